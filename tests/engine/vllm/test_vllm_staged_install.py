"""On a real vLLM: weights that are copied from the twin decode as those that vLLM loads itself."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from new_weights import give_weights
from served_engine import PROMPT, Served, ask, collect, drawn, logprobs_of, tokens_of
from served_vllm import REAL_VLLM

pytestmark = REAL_VLLM


NORM = "model.norm.weight"


def staging_way(served: Served) -> tuple[bool, str]:
    llm = served.engine._process.vllm.llm
    ((proved, why_reloads),) = served.call(llm.collective_rpc("asyncrl_staging_way"))
    return proved, why_reloads


def test_copying_was_proved_and_decodes_with_the_new_weights(served: Served) -> None:
    """Every version, also where the twin's memory has held two others in between."""
    for seed, model in enumerate((served.new, served.old, served.new, served.old)):
        served.install(model)
        assert staging_way(served) == (True, "")
        chunks = served.call(collect(served.engine, ask(f"copied{seed}", seed=seed, max_tokens=30)))
        wanted = drawn(model, PROMPT, tokens_of(chunks))
        np.testing.assert_allclose(logprobs_of(chunks), wanted, atol=2e-4)


def test_generation_continues_while_weights_are_staged_and_looked_at(served: Served) -> None:
    served.install(served.old)

    async def scene(seed: int) -> Any:
        engine = served.engine
        asked = ask(f"long{seed}", seed=seed, max_tokens=380)
        generating = asyncio.create_task(collect(engine, asked))
        version = engine.stats().policy_version
        while not generating.done():
            version += 1
            await give_weights(engine, served.old.state_dict().items(), version)
            await engine.fingerprint()
        return await generating

    for seed in range(20):  # one may end before the first installation
        chunks = served.call(scene(seed))
        if len({chunk.policy_version for chunk in chunks}) > 1:
            break
    else:
        pytest.fail("every response ended before the first installation")
    wanted = drawn(served.old, PROMPT, tokens_of(chunks))
    np.testing.assert_allclose(logprobs_of(chunks), wanted, atol=5e-4)


def test_a_model_whose_loading_leaves_more_than_tensors_is_reloaded(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """As where vLLM derives something from the weights. What decodes is right all the same."""
    llm = served.engine._process.vllm.llm
    served.install(served.old)
    served.call(llm.collective_rpc("asyncrl_fault", args=("deriving", NORM)))
    try:
        for seed, model in enumerate((served.new, served.old)):
            served.install(model)
            proved, why = staging_way(served)
            assert not proved
            assert why.endswith("loader does to model.norm.derived.0")
            asked = ask(f"reloaded{seed}", seed=seed, max_tokens=30)
            chunks = served.call(collect(served.engine, asked))
            wanted = drawn(model, PROMPT, tokens_of(chunks))
            np.testing.assert_allclose(logprobs_of(chunks), wanted, atol=2e-4)
        assert caplog.text.count("vLLM loads new weights while it is paused") == 1
    finally:
        served.call(llm.collective_rpc("asyncrl_fault", args=("none", "")))
        served.install(served.old)
    assert staging_way(served) == (True, "")
