"""SglangEngine: SGLang behind the `Engine` protocol, with the rollout cache drafting inside it."""

from __future__ import annotations

import os

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, to_json
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.client.engine import RemoteEngine
from asyncrl.engine.remote.extras import DrafterSettings
from asyncrl.engine.sglang.client.core import SglangCore
from asyncrl.engine.sglang.client.environment import SglangFolder, environment_of
from asyncrl.engine.sglang.client.process import SglangProcess
from asyncrl.engine.sglang.interpreter import path_of
from asyncrl.engine.sglang.settings import ServerSettings, WorkerSettings

_HEADROOM = 16
"""Tokens of a request that SGLang keeps free (6), the one drawn after a scored text, and spares."""
_MAX_STEP_TOKENS = 4096
"""Most tokens of a step that drafts. SGLang does not limit it; more never pays."""


def _drafts(cache_config: CacheConfig) -> int:
    return cache_config.draft_tokens if cache_config.enabled else 0


def server_settings(
    config: EngineConfig,
    model_path: str,
    cache_config: CacheConfig,
    seed: int,
    folder: SglangFolder,
) -> ServerSettings:
    """Return the settings from which SGLang's arguments are made."""
    drafts = _drafts(cache_config)
    return ServerSettings(
        folder=str(folder.path),
        model_path=model_path,
        seed=seed,
        # Requests are held to our limit.
        max_model_len=config.max_model_len + drafts + _HEADROOM,
        draft_tokens=drafts,
        config=config.model_dump(mode="json"),
    )


def worker_settings(
    config: EngineConfig, cache_config: CacheConfig, place: CachePlace, folder: SglangFolder
) -> WorkerSettings:
    """Return the settings of our part of the scheduler process."""
    ours = config.sglang
    drafting = DrafterSettings(
        cache=cache_config.model_dump(mode="json"),
        place=to_json(place),
        fixed_step_tokens=ours.max_step_tokens,
        max_step_tokens=max(_MAX_STEP_TOKENS, config.slots),
        logits_bytes=config.logits_bytes,
    )
    return WorkerSettings(
        requests=folder.requests,
        outputs=folder.outputs,
        parent=os.getpid(),
        top_k=config.top_k_logprobs,
        logits_bytes=config.logits_bytes,
        stage_on_device=config.weight_staging == "device",
        steps_per_message=ours.steps_per_message,
        drafting=drafting if _drafts(cache_config) else None,
    )


class SglangEngine(RemoteEngine):
    """The generator on SGLang; see `RemoteEngine`."""

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
            core = SglangCore(process, config.sglang.chunk_tokens)
            folder = process.open(core.take)
            worker = worker_settings(config, cache_config, place or CachePlace(), folder)
            process.start(
                path_of(config.sglang),
                environment_of(config, folder) | worker.to_environment(),
                server_settings(config, model_path, cache_config, seed, folder),
            )
            limit = config.sglang.start_limit
            try:
                await core.ready(limit)
            except EngineError as error:
                raise process.start_error(model_path, error, limit) from error
            return core

        super().__init__(config, model_path, seed=seed, process=process, start=start)
