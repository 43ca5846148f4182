"""SGLang's out-of-tree platform for CPUs: the official way to run it without a GPU (0.5.23).

Its CPU platform needs kernels of a special build (`SGLANG_USE_CPU_ENGINE`). This one has neither
Triton nor graphs, so SGLang chooses operations of torch everywhere. SGLang loads it while it
imports itself, so its names come from here and not from `worker.api`.
"""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from asyncrl.engine.sglang.messages import CPU_ATTENTION


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU with operations of torch only."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def is_pin_memory_available(self, device: Any = None) -> bool:  # noqa: ARG002
        """Return False: nothing is copied to a device."""
        return False

    def get_default_attention_backend(self) -> str:
        """Return our attention in operations of torch, with drafts and without."""
        return CPU_ATTENTION

    def get_dispatch_key_name(self) -> str:
        """Make layers run their `forward_native`."""
        return "native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:  # noqa: ARG002
        """Return True: ours drafts without a kernel."""
        return True

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Return our pool for ordinary attention; None leaves others to SGLang."""
        if kind != "mha":
            return None
        from asyncrl.engine.sglang.worker.api import MHATokenToKVPool

        class TorchKVPool(MHATokenToKVPool):
            """Moves entries by indexing: SGLang's kernel, which it warms up, needs Triton."""

            def _init_kv_copy_and_warmup(self) -> None:
                self._kv_copy_config = None
                self.use_native_move_kv_cache = True

        return TorchKVPool
