"""The embedded torch engine: any HF causal LM, exact drafting, no server beside it.

config    what can be set
model     loading, the self-check at start, one packed forward pass
slots     the KV slots, the layout of a step's tokens, attention over both
weights   checking and copying new weights
sampling  the processed distribution, seeded draws, top-K
rows      the running requests as a table of arrays
drafting  what to propose for each row
core      DecodeCore: add, step, abort, score, swap; synchronous and without a clock
scoring   log-probabilities of given tokens
engine    TorchEngine: the asyncio shell around the core
"""
