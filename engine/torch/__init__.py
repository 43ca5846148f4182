"""The embedded torch engine: any HF causal LM, exact drafting.

engine          TorchEngine: the asyncio shell around the core
core            DecodeCore: requests in, steps, token chunks out; synchronous
waiting         requests that wait for a slot
rows            the running requests as a table of arrays
admission       slots given to requests and taken back; siblings share a prefill
drafting        drafts of decoding rows, and their acceptance
step_inputs     the tokens of one forward pass
model           loading, the self-check at start, one packed forward pass
cpu             the same pass for Llama-like models on a CPU, in few calls
slots           the KV slots, the layout of a step's tokens, attention over both
step_sampling   a step's draws, and acceptance of kept tokens
reports         generated tokens turned into chunks
scoring         log-probabilities of given tokens
config          the settings
"""
