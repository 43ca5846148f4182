from __future__ import annotations

import pytest

from asyncrl.evaluation.round import Accuracy, EvaluationPlan, EvaluationRound, PlannedSet, plan_of
from asyncrl.tasks.evaluation_config import EvaluationConfig


def a_round(prompts: int, samples: int = 1) -> EvaluationRound:
    plan = EvaluationPlan((PlannedSet("held_out", prompts, samples),))
    return EvaluationRound(0, plan, EvaluationConfig())


def test_each_sample_is_assigned_to_one_generator_until_its_slots_are_full() -> None:
    current = a_round(5)
    assert current.next_for("a", 2) == [0, 1]
    assert current.next_for("a", 2) == []
    assert current.next_for("b", 9) == [2, 3, 4]
    current.came_back(0, 1.0)
    assert current.next_for("a", 2) == []
    assert not current.complete


def test_samples_of_a_lost_generator_are_assigned_again_and_count_once() -> None:
    current = a_round(2)
    current.next_for("a", 2)
    current.came_back(0, 1.0, 3)
    current.lost("a")
    assert current.waiting == 1
    assert current.deal("b", 2) == [1]
    current.came_back(1, 0.0, 5)
    current.came_back(1, 1.0, 9)
    assert current.complete
    main = current.record(7, "during").main
    assert main is not None
    assert (main.accuracy, main.samples, main.tokens) == (0.5, 2, 4.0)


def test_sets_and_their_samples_are_estimated_apart() -> None:
    config = EvaluationConfig.model_validate(
        {"prompts": 3, "sets": {"hard": {"path": "x.jsonl", "prompts": 2, "samples": 2}}}
    )
    plan = plan_of(config, {"held_out": 9, "hard": 1})
    assert plan == EvaluationPlan((PlannedSet("held_out", 3, 1), PlannedSet("hard", 1, 2)))
    current = EvaluationRound(4, plan, EvaluationConfig(), version=12)
    for index in current.deal("a", 9):
        name, _ = plan.place(index)
        current.came_back(index, 1.0 if name == "held_out" or index == 4 else 0.0)
    record = current.record(12, "during")
    assert [(name, one.accuracy) for name, one in record.sets.items()] == [
        ("held_out", 1.0),
        ("hard", 0.5),
    ]
    assert record.sets["hard"].pass_at == {1: 0.5, 2: 1.0}
    assert current.describe() == "step 12, 5/5"


def test_accuracy_is_that_of_the_first_set() -> None:
    current = a_round(100)
    for index in current.deal("a", 100):
        current.came_back(index, float(index < 75))
    accuracy = Accuracy.of(current.record(0, "before"))
    assert (accuracy.value, accuracy.samples) == (0.75, 100)
    assert accuracy.reward is None, "it is the accuracy"
    assert Accuracy.of(a_round(0).record(0, "before")) == Accuracy(None, 0)


def test_the_first_sample_of_the_first_prompts_of_each_set_is_shown() -> None:
    plan = EvaluationPlan((PlannedSet("held_out", 6, 2), PlannedSet("hard", 1, 3)))
    shown = {index: name for index in range(plan.total) if (name := plan.shown_of(index))}
    assert shown == {0: "held_out", 2: "held_out", 4: "held_out", 6: "held_out", 12: "hard"}
    with pytest.raises(IndexError):
        plan.shown_of(plan.total)
