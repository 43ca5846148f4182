"""The embedded torch engine: any HF causal LM, exact drafting.

engine        TorchEngine: the asyncio shell around the core
core          DecodeCore: requests in, steps, token chunks out; synchronous
waiting       requests that wait for a slot
rows          the running requests as a table of arrays
admission     slots given to requests and taken back; siblings share a prefill
drafting      what decoding rows draft, and what was accepted of it
feed          the tokens of one forward pass
model         loading, the self-check at start, one packed forward pass
fused         the same pass for Llama-like models on a CPU, in few calls; fused_kernels: its loops
slots         the KV slots, the layout of a step's tokens, attention over both
draws         a step's draws
verification  acceptance of kept tokens
reports       generated tokens turned into chunks
scoring       log-probabilities of given tokens
config        what can be set
"""
