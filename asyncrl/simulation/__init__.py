"""The scheduler in a discrete-event simulation: what a mode would do on a cluster.

world      events in time order, the very `scheduler.Scheduler` that runs live
fleet      generators that share their decoding speed among their requests
cost       seconds of decoding, scoring and training: a roofline, or as measured
lengths    how long answers are, and how much of them survives a policy update
fit        the cost of a real run, from its records
study      modes side by side, sweeps, the regime map
tables     the same for people
"""
