"""How much to draft and from what, for every engine. It may only change speed.

planner        how many tokens a decode step drafts, from what steps cost and drafts yield
step_times     seconds of a step by tokens, rows and context, learned from the steps of this run
calibration    from estimated acceptance probabilities to observed ones
continuation   earlier continuations of a response that is resumed, followed token by token
"""
