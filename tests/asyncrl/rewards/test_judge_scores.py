"""The score in a judge's answer, whatever the answer is."""

from __future__ import annotations

import pytest

from asyncrl.rewards import judge as judging
from asyncrl.rewards.values import NoRewardError


def test_the_score_of_a_judge() -> None:
    read = judging.score_in
    assert read("Score: 3. No.\nScore: 7.5", r"Score: ([\d.]*\d)", None) == 7.5
    assert read('```json\n{"a": {"score": 4}}\n```', None, "a.score") == 4.0
    assert read('{"score": "-2"}', None, "score") == -2.0
    for said, pattern, field in (
        ("I refuse", r"Score: (\d+)", None),
        ("Score: ten", r"Score: (\w+)", None),
        ("Score: nan", r"Score: (\w+)", None),
        ("no JSON", None, "score"),
        ('{"score": true}', None, "score"),
        ('{"score": null}', None, "score"),
        ("[3]", None, "score"),
        ("[" * 100_000, None, "score"),
        (f'{{"score": 1{"0" * 400}}}', None, "score"),
    ):
        with pytest.raises(NoRewardError) as failed:
            read(said, pattern, field)
        assert failed.value.reason == "no_score"
    words = {"prompt": "P", "response": "{answer}{prompt}", "answer": "A"}
    assert judging.fill('{"q": "{prompt}"} {response}', words) == '{"q": "P"} {answer}{prompt}'
