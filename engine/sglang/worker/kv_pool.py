"""SGLang's KV pool on a machine without Triton (0.5.23)."""

from __future__ import annotations

from asyncrl.engine.sglang.worker.api import MHATokenToKVPool


class TorchKVPool(MHATokenToKVPool):
    """Moves entries by indexing: SGLang's kernel for that, which it warms up, needs Triton."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
