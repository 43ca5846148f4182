"""Names, settings, calls and additions to requests that vLLM's two processes share.

vLLM imports our classes by name, and carries our settings and additions to requests between its
processes without reading them. `collective_rpc` carries arguments and results, so both are
builtins. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.engine.remote.extras import DrafterSettings, RemoteWorker, RequestExtra

EXTENSION_PATH = "asyncrl.engine.vllm.worker.extension.WorkerExtension"
"""Value of `worker_extension_cls`."""
DRAFTER_PATH = "asyncrl.engine.vllm.worker.drafter.make_drafter"
"""Value of `speculative_config["model"]`."""
SCHEDULER_PATH = "asyncrl.engine.vllm.worker.scheduler.make_scheduler"
"""Value of `scheduler_cls`."""
ADAPTER_ID = 1
"""Id of the adapter that all requests name, if one is kept apart from the model."""
SECTION = "asyncrl"
"""Key of our part in vLLM's `additional_config` and in a request's `extra_args`."""


def to_extra_args(extra: RequestExtra) -> dict[str, Any]:
    """Return the `extra_args` of a request's `SamplingParams`."""
    return {SECTION: extra.to_plain()}


def from_extra_args(extra_args: dict[str, Any] | None) -> RequestExtra:
    """Read what `to_extra_args` made. Raises KeyError if this engine did not send it."""
    return RequestExtra.from_plain((extra_args or {})[SECTION])


class CoreSettings(msgspec.Struct, frozen=True):
    """Our part of vLLM's `additional_config`."""

    steps_per_message: int
    drafter: DrafterSettings | None = None

    def to_config(self) -> dict[str, Any]:
        """Return vLLM's `additional_config`."""
        return {SECTION: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, additional_config: dict[str, Any]) -> CoreSettings:
        """Read what `to_config` made."""
        return msgspec.convert(additional_config[SECTION], cls)


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
