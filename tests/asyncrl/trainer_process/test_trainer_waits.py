"""The cause of waiting that a trainer records."""

import pytest

from asyncrl.trainer_process.step_trainer import waited_for


@pytest.mark.parametrize(
    ("done", "groups", "cause"),
    [
        (0, 4, "first group"),
        (1, 4, "more groups"),
        (2, 4, "more groups"),
        (3, 4, "last group"),
        (4, 4, "step plan"),
        (0, 1, "first group"),
        (1, 1, "step plan"),
        (0, 0, "step plan"),
    ],
)
def test_the_cause_of_waiting_names_what_is_missing(done, groups, cause):
    assert waited_for(done, groups) == cause
