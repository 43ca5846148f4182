"""Decides what to draft, and how much. Drafts can only change speed.

continuation   earlier continuations of resumed responses, followed token by token
proposals      drafts for the rows of a step, from continuations and the cache
trees          drafts checked and laid out as token trees, for engines that feed them
planner        how many tokens a decode step drafts, from step costs and acceptance
step_times     seconds of a step by tokens, rows and context, learned from the steps of this run
calibration    maps estimated acceptance probabilities to observed ones
"""
