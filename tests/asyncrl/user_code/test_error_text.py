"""What is quoted of a traceback begins with a frame, and with the user's code if it has a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.user_code import streams
from asyncrl.user_code.streams import TRACEBACK_LINES, last_lines


def deep(levels: int) -> int:
    return [][levels] if levels == 0 else deep(levels - 1)


def test_a_long_traceback_is_cut_between_two_frames() -> None:
    try:
        deep(9)
    except IndexError:
        lines = last_lines().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith("  File ")
    assert lines[-1] == "IndexError: list index out of range"
    assert 4 < len(lines) <= TRACEBACK_LINES


OWN = """
def reset():
    raise ValueError("a row needs `program`")

def serve(last_lines):
    try:
        reset()
    except ValueError:
        return last_lines()
"""


def test_of_code_that_is_all_ours_the_last_frame_is_shown() -> None:
    place = Path(streams.__file__).parents[1] / "environments" / "made_here.py"
    made: dict[str, Any] = {}
    exec(compile(OWN, str(place), "exec"), made)  # noqa: S102 - a file that is not there
    lines = made["serve"](last_lines).splitlines()
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{place}", line 3, in reset',
        "ValueError: a row needs `program`",
    ]


def test_a_long_text_of_an_exception_hides_neither_its_kind_nor_its_place() -> None:
    try:
        raise ValueError("\n".join(map(str, range(20))))
    except ValueError:
        lines = last_lines().splitlines()
    assert lines[-5:] == ["ValueError: 0", "1", "2", "3", "... (16 more lines)"]
    assert "test_error_text.py" in lines[1]
    assert len(lines) <= TRACEBACK_LINES
