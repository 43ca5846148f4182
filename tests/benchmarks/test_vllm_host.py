"""The benchmark of what the generator costs vLLM: how rounds become numbers, and one tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_engine import TOP_K, VOCAB, Served
from served_vllm import REAL_VLLM

from benchmarks.vllm_host import main, sides
from benchmarks.vllm_host.sides import Ours, Plain, Spent, config_of

pytestmark = REAL_VLLM


def spent(wall: float, client: float, **hooks: float) -> Spent:
    return Spent(100, wall, client, 1.0, hooks)


def test_ratios_are_medians_of_pairs_and_costs_are_differences() -> None:
    ours = [spent(wall, 4e-4, draw=5e-4, table=1e-4) for wall in (1.0, 2.0, 8.0)]
    plain = [spent(wall, 1e-4, draw=3e-4) for wall in (0.5, 2.0, 8.8)]
    assert main.speed_ratio(ours, plain) == pytest.approx(1.0)
    costs = main.host_costs(ours, plain)
    assert costs == pytest.approx({"client": 3.0, "table": 1.0})


@pytest.mark.slow
def test_rounds_of_both_sides_become_ratios(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is the engine of other tests; plain vLLM has its own."""
    effort = main.Effort(1, 8, 8, topk_rows=4, top_k=TOP_K, host_rows=4)
    config = config_of(effort.host_rows, effort.host_tokens, TOP_K)
    served.old.save_pretrained(tmp_path / "model")
    prompt = [place % VOCAB for place in range(sides.PROMPT)]
    monkeypatch.setattr(sides, "prompt_of", lambda _index: prompt)

    async def rounds() -> dict[str, list[Spent]]:
        ours = Ours(served.engine)
        await ours.attach()
        async with Plain.running(config, str(tmp_path / "model")) as plain:
            return await main.host_rounds(effort, ours, plain, TOP_K)

    measured = served.call(rounds())

    async def recorded(*_: object) -> dict[str, list[Spent]]:
        return measured

    monkeypatch.setattr(main, "measure_host", recorded)
    file = tmp_path / "host.json"
    main.main(["--quick", "--part", "host", "--json", str(file)])
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written["ratios"]) == {"host_us_per_row_step", "host_core_us_per_row_step"}
    (ours,), (plain,) = written["raw"]["host"]["ours"], written["raw"]["host"]["plain"]
    assert min(ours["client"], plain["client"], ours["wall"], plain["wall"]) > 0
    assert set(ours["hooks"]) == {
        "draw", "sampler", "table", "drafter, before the step", "drafter, after the step"
    }  # fmt: skip
    assert min(ours["hooks"].values()) > 0
    assert set(plain["hooks"]) == {"draw"}
