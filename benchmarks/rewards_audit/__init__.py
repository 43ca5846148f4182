"""Are the rewards that are trained on those of the tokens that are trained on?

games      environments that fail and reward in the middle
recompute  the reward of a sample from its tokens, by an environment of this process
main       runs, and a table
"""
