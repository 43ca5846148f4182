"""Decides what to draft, and how much. It can only change speed.

continuation   earlier continuations of resumed responses, followed token by token
proposals      drafts for the rows of a step, from both
trees          drafts checked and laid out as token trees, for engines that feed them
planner        how many tokens a decode step drafts, from what steps cost and what drafts yield
step_times     seconds of a step by tokens, rows and context, learned from the steps of this run
calibration    maps estimated acceptance probabilities to observed ones
fixed_budget   a planner that drafts a fixed number of tokens, for comparisons and tests
"""
