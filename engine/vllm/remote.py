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

        It also proves how new weights are installed: minutes, for large models.

        Args:
            parent: id of the generator's process.
            top_k: K of the reported lists (engine.top_k_logprobs); 0: none is reported.
            logits_bytes: memory that drawing and scoring may hold at once (engine.logits_mib).
            stage_on_device: True if new weights wait on the model's device (engine.weight_staging).
        """
        raise NotImplementedError
