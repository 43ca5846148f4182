"""SglangEngine: SGLang behind the `Engine` protocol, with the cache of rollouts drafting inside it.

The parts are `process` (starting, watching, stopping SGLang), `link` (the sockets to its scheduler
process), `core` (the calls) and `outputs` (what comes back); everything else is
`asyncrl.engine.remote.client`. What both processes agree on is in `asyncrl.engine.sglang.messages`,
`calls`, `settings` and `server_settings`.
"""

from __future__ import annotations

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.remote.client.engine import RemoteEngine
from asyncrl.engine.sglang.client.core import SglangCore
from asyncrl.engine.sglang.client.launch import launch
from asyncrl.engine.sglang.client.process import SglangProcess


class SglangEngine(RemoteEngine):
    """The generator on SGLang.

    Args:
        config: of the engine.
        model_path: a directory in HF format or a hub id.
        cache_config: of the cache of rollouts that drafts inside SGLang.
        seed: of the stream that gives seeds to requests without one.
        place: where the cache's snapshot is, and how rollouts are exchanged.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        cache_config: CacheConfig,
        seed: int,
        place: CachePlace | None = None,
    ) -> None:
        self._process = process = SglangProcess(config.sglang)

        async def start() -> SglangCore:
            return await launch(
                process, config, model_path, cache_config, seed, place or CachePlace()
            )

        super().__init__(
            config,
            model_path,
            seed=seed,
            process=process,
            start=start,
            call_timeout_seconds=config.sglang.call_timeout_seconds,
        )
