"""A worker extension that says how long the proof takes. It runs in vLLM's core."""

import time

from asyncrl.engine.remote.worker.staging import WorkerWeights
from asyncrl.engine.vllm.worker.extension import WorkerExtension
from asyncrl.engine.vllm.worker.weights import VllmLoader


class ProvingExtension(WorkerExtension):
    def timed_proof(self) -> tuple[float, int]:
        """Seconds of proving how weights are installed, and their bytes; before any is."""
        loader = VllmLoader(self)
        weights = WorkerWeights(loader)
        began = time.perf_counter()
        weights.prove()
        seconds = time.perf_counter() - began
        assert weights._twin is not None  # noqa: SLF001
        return seconds, sum(one.nbytes for _, one in weights._own().items())  # noqa: SLF001
