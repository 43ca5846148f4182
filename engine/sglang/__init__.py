"""SGLang as a generator's engine.

`client/` runs in the generator's process and does not import SGLang. `worker/` runs in SGLang's
processes, whose interpreter may be another one (`SglangConfig.python`): SGLang's pins disagree with
vLLM's. `messages` defines the messages between them.
"""
