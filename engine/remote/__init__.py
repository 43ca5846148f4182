"""The common part of engines whose model runs in a separate process, such as vLLM and SGLang.

    client/     runs in the generator's process: requests, chunks, pauses, weights
    worker/     runs with the model, in the engine's *core*: draws, scores, drafts, weights
    extras.py   the calls from one to the other, and what travels with requests and results

An engine adds the process that it starts and a `Core` (`client.core`) on one side, and adapters
from its scheduler, model runner and loader to `worker/` on the other. Nothing here imports vLLM or
SGLang, and neither half imports the other.
"""
