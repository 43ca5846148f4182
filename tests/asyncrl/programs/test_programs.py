"""Programs in responses, tests in rows, and when a value is right."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.programs.asking import program_of
from asyncrl.programs.tests import Asserted, Called, is_right, read_tests

PYTHON = "print(1)\n"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("a\n```py\nx = 1\n```\nb\n```python\ny = 2\n", "y = 2\n"),
        ("x = 1", "x = 1"),
        ("It says ```x``` and ends", "It says ```x``` and ends"),
        ("```python3\nprint(1)\n```\nThat is all.", PYTHON),
        ("```Python\nprint(1)\n```\nThat is all.", PYTHON),
        ("```python\r\nprint(1)\r\n```\r\n", PYTHON),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", PYTHON),
        ("```\nprint(1)\n```\nRun it:\n```bash\npython a.py\n```", PYTHON),
        ("```python\nprint('''```''')\n```", "print('''```''')\n"),
        ("1. So:\n   ```python\n   if 1:\n     x\n   ```\n", "if 1:\n  x\n"),
        ("Answer: ```python\nprint(1)\n```", PYTHON),
        ('```python title="a.py"\nprint(1)\n```', PYTHON),
        ("````python\nprint(1)\n```\n````", PYTHON + "```\n"),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, program: str) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("assertion", "read"),
    [
        ("assert f(1) == 2", Called("f", "[1]", 2, bools_are_numbers=True)),
        ("assert(f(1) == 2)", Called("f", "[1]", 2, bools_are_numbers=True)),
        ("f((1, 2), -1) == (3,)", Called("f", "[(1, 2), -1]", [3], bools_are_numbers=True)),
        ("'a' == S().f({1})", Called("S().f", "[{1}]", "a", bools_are_numbers=True)),
        ("f(1) == {1}", Asserted("f(1) == {1}")),
        ("f(x=1) == 2", Asserted("f(x=1) == 2")),
        ("assert abs(f(1) - 2) < 1e-6, 'far'", Asserted("abs(f(1) - 2) < 1e-06")),
        ("f(1) == f(2)", Asserted("f(1) == f(2)")),
        ("f(f(1)) == 1 == 1", Asserted("f(f(1)) == 1 == 1")),
    ],
)
def test_asserts_that_compare_a_call_with_a_value_are_calls(assertion: str, read: Any) -> None:
    assert read_tests([{"assert": assertion}], "tests") == [read]


@pytest.mark.parametrize(
    ("found", "wanted", "right"),
    [
        (2, 2.0, True),
        (True, 1, False),
        ([True], [1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], (1, 2), True),
        ({"1": 2}, {1: 2}, True),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
        (10**400, 1.0, False),
        (10**400, 10**400, True),
        (float("inf"), float("inf"), True),
    ],
)
def test_values_are_right_whatever_their_spelling(found: Any, wanted: Any, right: bool) -> None:
    (test,) = read_tests([{"call": "f", "args": [], "returns": wanted}], "tests")
    assert isinstance(test, Called)
    assert is_right(found, test) is right


def test_asserts_compare_as_python_does_and_floats_within_the_tolerance() -> None:
    assert is_right(1, Called("f", "[]", True, bools_are_numbers=True))
    assert not is_right(0.30000000000000004, Called("f", "[]", 0.3))
    assert is_right([0.30000000000000004], Called("f", "[]", [0.3]), 1e-9)
    assert not is_right(3, Called("f", "[]", 4), 0.5)
