"""The built-in task: correct workings, several phrasings, and a held-out side."""

import itertools

import numpy as np
import pytest
from pydantic import ValidationError

from asyncrl.errors import DataError
from asyncrl.rewards.functions import arithmetic
from asyncrl.tasks.builtin.arithmetic import (
    PHRASINGS,
    Problem,
    arithmetic_questions,
    draw_problems,
    working,
)
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.prompts import prompt_order


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (38, 295, "8+5+0=13,3+9+1=13,0+2+1=03:333"),
        (99, 1, "9+1+0=10,9+0+1=10:100"),
        (0, 0, "0+0+0=00:0"),
    ],
)
def test_working_is_column_addition(a: int, b: int, expected: str) -> None:
    assert working(Problem(a, b, 0)) == expected


def test_every_working_without_slips_is_rewarded_and_with_slips_only_some() -> None:
    rng = np.random.default_rng(0)
    problems = list(itertools.islice(draw_problems(rng, (1, 4), held_out=False), 400))
    examples = [{"answer": p.answer} for p in problems]
    pairs = list(zip(problems, examples, strict=True))
    clean = [arithmetic(p.question, working(p), example) for p, example in pairs]
    careless = [arithmetic(p.question, working(p, rng, 0.1), example) for p, example in pairs]
    assert set(clean) == {1.0}
    assert 0.6 < np.mean(careless) < 0.9


def test_sets_are_deterministic_disjoint_and_varied() -> None:
    config = TaskConfig(train_size=600, evaluation_size=300)
    train, evaluation = arithmetic_questions(config, seed=1)
    again, same_evaluation = arithmetic_questions(config, seed=1)
    other, evaluation_of_other_seed = arithmetic_questions(config, seed=2)
    assert train == again
    assert evaluation == same_evaluation == evaluation_of_other_seed
    assert [q.prompt_id for q in train] != [q.prompt_id for q in other]

    def pairs(questions):  # type: ignore[no-untyped-def]
        return {tuple(sorted((q.example["a"], q.example["b"]))) for q in questions}

    held_out = pairs(evaluation)
    assert not held_out & pairs(train)
    assert not held_out & pairs(other)
    for side in (train, evaluation):
        assert len({q.prompt_id for q in side}) == len(side)
        shapes = {"".join(c for c in str(q.content) if not c.isdigit()) for q in side}
        assert len(shapes) == len(PHRASINGS) >= 4


def test_a_problem_is_held_out_in_either_order_and_any_phrasing() -> None:
    for a, b in itertools.product(range(20, 40), repeat=2):
        sides = {Problem(*pair, p).held_out for pair in ((a, b), (b, a)) for p in range(3)}
        assert len(sides) == 1


def test_too_few_problems_are_refused() -> None:
    with pytest.raises(DataError, match=r"task\.train_size \(9999\).*raise task\.digits"):
        arithmetic_questions(TaskConfig(digits=(1, 1), train_size=9999), seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"digits": (3, 2)}, "fewest <= most"),
        ({"digits": (0, 2)}, "fewest <= most"),
        ({"kind": "dataset"}, "needs a path"),
        ({"digitz": (1, 2)}, "Extra inputs"),
    ],
)
def test_config_refuses(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TaskConfig.model_validate(values)


def test_prompt_order_visits_each_prompt_once_an_epoch_in_a_new_order() -> None:
    epochs = [[prompt_order(50, 7, e * 50 + i) for i in range(50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [prompt_order(50, 7, i) for i in range(50)] == epochs[0]
    assert [prompt_order(50, -8, i) for i in range(50)] != epochs[0]
    for n, position in ((0, 0), (5, -1)):
        with pytest.raises(ValueError, match="no prompt at position"):
            prompt_order(n, 0, position)
