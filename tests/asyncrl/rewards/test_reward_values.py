"""What a reward function returns: numbers that training can use, or a failure that says why."""

from __future__ import annotations

import asyncio
import logging
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_pools import running

from asyncrl.errors import RewardFailed
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.protocol import WHOLE_SUM, Call, Failed, Scored
from asyncrl.rewards.values import MAX_FLOAT32
from asyncrl.rewards.worker import LoadedTerm, finish, score
from asyncrl.trainer_process.step_trainer import RankPart, mean_terms, sums_of


class BadlyShown:
    """Its `repr` fails, and so does its conversion."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def scored(*results: Any, weight: float = 1.0) -> Scored | Failed:
    """Score a call with functions that return these values, or raise them."""

    def make(result: Any) -> Any:
        def function(prompt: str, response: str, example: dict[str, Any]) -> Any:
            if isinstance(result, BaseException):
                raise result
            return result

        return function

    terms = [LoadedTerm(make(r), weight, {}, "example", asynchronous=False) for r in results]
    return finish(score(Call(3, "", "", {}), terms, lambda _began: None))


@pytest.mark.parametrize(
    "result", [1, True, 0.5, np.float32(0.5), np.int64(3), np.array(2.0), torch.tensor(1.5),
               Decimal("0.25"), MAX_FLOAT32],
)  # fmt: skip
def test_any_number_is_a_reward(result: Any) -> None:
    got = scored(result)
    assert isinstance(got, Scored)
    assert got.terms == (float(result),)


@pytest.mark.parametrize(
    ("result", "reason", "text"),
    [
        (1e39, "not_finite", "float32 (at most 3.4e38), got 1e+39"),
        (-1e300, "not_finite", "got -1e+300"),
        (10**400, "not_finite", "must return a finite number, got int: 1000"),
        pytest.param(10**5000, "not_finite", "got int that cannot be printed", id="long int"),
        (float("nan"), "not_finite", "got nan"),
        ("1.0", "not_a_number", "got str: '1.0'"),
        ([1.0], "not_a_number", "got list: [1.0]"),
        (1j, "not_a_number", "got complex: 1j"),
        (np.ones(3), "not_a_number", "got ndarray"),
        (torch.ones(2), "not_a_number", "got Tensor"),
        (BadlyShown(), "not_a_number", "got BadlyShown: <BadlyShown instance"),
        (ValueError("\ud800"), "raised", r"ValueError: \ud800"),
        (ValueError("x" * 10**6), "raised", "xxx ... xxx"),
        (KeyboardInterrupt(), "raised", "KeyboardInterrupt"),
    ],
)
def test_anything_else_is_a_failure_that_shows_the_value(
    result: Any, reason: str, text: str
) -> None:
    got = scored(0.0, result)
    assert isinstance(got, Failed)
    assert (got.call, got.term, got.reason) == (3, 1, reason)
    assert text in got.message
    assert len(got.message) < 5000


def test_a_sum_that_overflows_float32_is_refused() -> None:
    got = scored(3e38, 3e38)
    assert isinstance(got, Failed)
    assert (got.term, got.reason) == (WHOLE_SUM, "not_finite")
    assert "weighted sum of the rewards must be a finite number in float32" in got.message
    assert isinstance(scored(3e38, -3e38), Scored)


def test_none_leaves_a_function_out_of_the_sum() -> None:
    got = scored(None, 0.5, weight=2.0)
    assert isinstance(got, Scored)
    assert (got.value, got.terms) == (1.0, (None, 0.5))
    parts = [RankPart((0,), 2, sums_of(rows), 0.0, follows=True) for rows in (
        [(None, 0.5, None)], [(1.0, 0.0, None), (None, 1.0, None)])]  # fmt: skip
    assert mean_terms(parts) == (1.0, 0.5, None)


OTHERS = """
import numpy as np

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "none":
        return None
    assert extra_info == {"split": "train"}
    return {"score": float(solution_str == ground_truth), "acc": 1}

def of_trl(prompts, completions, answer, **kwargs):
    assert prompts[0][0]["role"] == "user"
    found = [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]
    return np.array(found)
"""


def test_rewards_of_verl_and_trl_are_called_as_there_and_none_is_a_number_of_neither(
    tmp_path: Path,
) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(OTHERS)
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train"},
        "answer": "2",
    }
    example = {"prompt": "1+1", "answer": None, "row": row}
    silent = {**example, "row": row | {"data_source": "none"}}
    names = [{"name": f"{file}:{name}"} for name in ("compute_score", "of_trl")]

    async def check() -> None:
        async with running(*names) as pool:
            assert (await pool.score("1+1", "2", example)).terms == (1.0, 1.0)
            assert (await pool.score("1+1", "3", example)).terms == (0.0, 0.0)
            assert (await pool.score("1+1", "2", silent)).terms == (None, 1.0)
        async with running(names[0]) as pool:
            with pytest.raises(RewardFailed, match=r"example 'q-7': .* returned None.*task.map"):
                await pool.score("1+1", "2", silent, example_id="q-7")
            beside = await pool.score("1+1", "2", silent, is_beside_another=True)
            assert beside == (0.0, (None,), "scored")

    asyncio.run(check())


def test_functions_have_short_labels_that_differ() -> None:
    names = ["format", "a/x.py:score", "b/y.py:score", "mine:quality", "format", "a/x.py:score"]
    config = RewardConfig.model_validate({"functions": [{"name": name} for name in names]})
    assert config.labels == (
        "format", "a/x.py:score", "b/y.py:score", "quality", "format#2", "a/x.py:score#2",
    )  # fmt: skip


def test_failures_are_counted_and_absurd_values_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response, example):\n    return float(response)\n")

    async def check() -> None:
        async with running({"name": f"{file}:score"}, on_error="zero") as pool:
            for response in ("1e39", "two", "-2e6", "5e6", "3e6", "1"):
                await pool.score("", response, {}, example_id="q-1")
            assert pool.counts.failed == {"score": {"not_finite": 1, "raised": 1}}
            assert (pool.counts.failures, pool.scored) == (2, 4)
            assert pool.counts.largest == {"score": 5e6}
            await asyncio.gather(*(pool.score("", "two", {}) for _ in range(99)))
            assert pool.counts.failed["score"]["raised"] == 100

    with caplog.at_level(logging.WARNING):
        asyncio.run(check())
    assert caplog.text.count("dominate every advantage") == 1
    assert caplog.text.count("could not convert string to float: 'two'") == 10 + 3
    assert "mine.py:score' failed for the response '1e39' to example 'q-1'" in caplog.text
