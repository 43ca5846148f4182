"""What is said of a damaged model folder is judged: each kind of fault, and each damage's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.damaged_models import DAMAGES, Damage
from benchmarks.model_folders import CPU_SECONDS, KINDS, Answer, judge, ratios_of

FOLDER = Path("/models/mine")
HARMFUL = Damage("harmful", lambda _: None, ("config.json", "999"))
HARMLESS = Damage("harmless", lambda _: None, ("9 of",), trains=True)
SENTENCE = "model.path: /models/mine: config.json has 999"
RIGHT = Answer(2, f"model  mine\nerror: {SENTENCE}\n", 1.0, begun=False)


def kinds(damage: Damage, answer: Answer, sound: float = 4.0) -> set[str]:
    """The kinds of faults that are found."""
    verdict = judge(damage, FOLDER, answer, sound)
    return {kind for kind in KINDS if getattr(verdict, kind)}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (RIGHT, set()),
        (Answer(0, "result: ...", 9.0, begun=True, entropy=4.0), {"silent"}),
        (Answer(1, "Traceback (most recent", 1.0, begun=False), {"tracebacks"}),
        (Answer(-9, "", 1.0, begun=False), {"tracebacks"}),
        (Answer(2, "error: KeyError: 'x' of /models/mine", 1.0, begun=False), {"unnamed"}),
        (Answer(2, f"error: {SENTENCE}\nerror: {SENTENCE}", 1.0, begun=False), {"unnamed"}),
        (Answer(2, f"error: {SENTENCE}{'x' * 1000}", 1.0, begun=False), {"unnamed"}),
        (Answer(1, "", 1.0, begun=False), {"unnamed"}),
        (Answer(1, f"error: {SENTENCE}", 1.0, begun=True), {"late"}),
        (Answer(1, f"error: {SENTENCE}", CPU_SECONDS + 1, begun=False), {"late"}),
    ],
)  # fmt: skip
def test_a_harmful_folder_is_refused_in_one_sentence_at_once(
    answer: Answer, found: set[str]
) -> None:
    assert kinds(HARMFUL, answer) == found


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(0, "weights: 9 of ...", 30.0, begun=True, entropy=4.001), set()),
        (Answer(0, "weights: ...", 30.0, begun=True, entropy=4.0), {"unnamed"}),
        (Answer(0, "weights: 9 of ...", 30.0, begun=True, entropy=4.1), {"silent"}),
        (Answer(0, "weights: 9 of ...", 30.0, begun=True, entropy=None), {"not_trained"}),
        (Answer(2, f"error: {SENTENCE}", 1.0, begun=False), {"not_trained"}),
    ],
)
def test_a_harmless_folder_is_trained_as_the_sound_one(answer: Answer, found: set[str]) -> None:
    assert kinds(HARMLESS, answer) == found


def test_faults_are_counted_by_kind() -> None:
    verdicts = [
        judge(HARMFUL, FOLDER, one, None) for one in (RIGHT, Answer(0, "", 1.0, begun=True))
    ]
    assert ratios_of(verdicts) == {"folders": 2, **dict.fromkeys(KINDS, 0), "silent": 1}
    assert [one.faults for one in verdicts] == ["", "was not refused"]


def test_each_damage_has_its_own_name_and_says_what_is_to_be_named() -> None:
    assert len({one.name for one in DAMAGES}) == len(DAMAGES) >= 40
    assert all(one.trains or one.named for one in DAMAGES)
