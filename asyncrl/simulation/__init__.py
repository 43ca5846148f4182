"""Simulates a cluster: the live scheduler with simulated generators.

setting         what a run is given
world           due events in time order around `scheduler.Scheduler`, the same one that runs live
sim_generator   generators that share their decoding speed among their requests
cost            seconds of decoding, scoring and training: from a roofline or as measured
lengths         how long answers are, and how much of them survives a policy update
fit             the costs of a real run, from its records
study           modes compared, sweeps, the map of regimes
tables          the results as tables
command         `asyncrl simulate`: options and output
"""
