"""Our classes that vLLM imports by name, and the calls to its worker.

vLLM's `collective_rpc` carries arguments and results, so both are builtins.
"""

from __future__ import annotations

from asyncrl.engine.remote.calls import RemoteWorker

EXTENSION_PATH = "asyncrl.engine.vllm.worker.extension.WorkerExtension"
"""Value of `worker_extension_cls`."""
DRAFTER_PATH = "asyncrl.engine.vllm.worker.drafter.make_drafter"
"""Value of `speculative_config["model"]`."""
SCHEDULER_PATH = "asyncrl.engine.vllm.worker.scheduler.make_scheduler"
"""Value of `scheduler_cls`."""
ADAPTER_ID = 1
"""Id of the adapter that all requests name, if one is kept apart from the model."""


class VllmWorker(RemoteWorker):
    """The calls; `asyncrl.engine.vllm.worker.extension` implements them."""

    def asyncrl_attach(
        self, parent: int, top_k: int, logits_bytes: int, stage_on_device: bool
    ) -> None:
        """Install our drawing, scoring and drafting, and exit when process `parent` has ended.

        It also proves how new weights are installed: minutes, for large models. `top_k` is K of the
        reported lists (0: none), `logits_bytes` the memory that drawing and scoring may hold at
        once; new weights wait on the model's device if `stage_on_device`.
        """
        raise NotImplementedError
