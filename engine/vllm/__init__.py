"""vLLM as a generator. vLLM itself is imported only when an engine starts.

    client/     runs in the generator's process
    worker/     runs inside vLLM's engine-core process
    remote.py   the calls from one to the other, and additions to vLLM's own messages

Neither half imports the other.
"""
