from __future__ import annotations

import pytest

from asyncrl.evaluation.round import Accuracy, EvaluationRound


def test_each_sample_is_assigned_to_one_generator_until_its_slots_are_full() -> None:
    current = EvaluationRound(0, 5, threshold=0.5)
    assert current.next_for("a", 2) == [0, 1]
    assert current.next_for("a", 2) == []
    assert current.next_for("b", 9) == [2, 3, 4]
    current.came_back(0, 1.0)
    assert current.next_for("a", 2) == []
    assert not current.complete


def test_samples_of_a_lost_generator_are_assigned_again_and_count_once() -> None:
    current = EvaluationRound(0, 2, threshold=0.5)
    current.next_for("a", 2)
    current.came_back(0, 1.0)
    current.lost("a")
    assert current.next_for("b", 2) == [1]
    current.came_back(1, 0.0)
    current.came_back(1, 1.0)
    assert current.complete
    assert current.accuracy() == Accuracy(right=1, samples=2)


def test_accuracy_has_a_margin() -> None:
    accuracy = Accuracy(right=75, samples=100)
    assert accuracy.value == 0.75
    assert accuracy.margin == pytest.approx(0.0849, abs=1e-4)
    assert Accuracy(0, 0).value == 0.0
