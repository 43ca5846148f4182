r"""The tests of a problem, and the comparison of values. Import-light.

A column of the problem's row holds a list of tests, each in one of these forms:

    {"input": "3 4\n", "output": "7\n"}           standard input and the output that is right
    {"call": "add", "args": [3, 4], "returns": 7}  a function of the program, and what it returns
    {"assert": "add(3, 4) == 7"}                   an expression that must be true

An `assert` that compares one call with one value is read as a call, since a program cannot forge
that. Others are judged by the process that runs the program.
"""

import ast
import functools
import json
import math
import warnings
from dataclasses import dataclass
from typing import Any

_FORMS = (
    frozenset({"input", "output"}),
    frozenset({"call", "args", "returns"}),
    frozenset({"assert"}),
)
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class Printed:
    """The program's output for a standard input."""

    given: str
    output: str


@dataclass(frozen=True, slots=True)
class Called:
    """The return value of a function of the program."""

    function: str
    """An expression, such as `add` or `Solution().add`."""
    arguments: str
    """The list of arguments in Python syntax."""
    returns: Any
    bools_are_numbers: bool = False
    """True if True equals 1, as for Python's `==`."""

    @property
    def shown(self) -> str:
        """The call in Python syntax."""
        return f"{self.function}({self.arguments[1:-1]})"


@dataclass(frozen=True, slots=True)
class Asserted:
    """An expression that must be true next to the program. The program can forge it."""

    expression: str


Test = Printed | Called | Asserted


def read_tests(given: Any, column: str) -> list[Test]:
    """Read a row's tests from a list or JSON text. Raises ValueError if one is impossible."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the column {column!r} is not JSON: {error}") from error
    if not isinstance(given, list) or not given:
        raise ValueError(f"the row has no tests in the column {column!r}; set args.tests")
    tests: list[Test] = []
    for place, test in enumerate(given):
        try:
            tests.append(_test(test))
        except ValueError as error:
            raise ValueError(f"test {place} of the column {column!r} {error}") from error
    return tests


def _test(given: Any) -> Test:
    if not isinstance(given, dict) or frozenset(given) not in _FORMS:
        forms = " or ".join("{" + ", ".join(sorted(form)) + "}" for form in _FORMS)
        raise ValueError(f"must have the keys {forms}, not {given!r:.200}")
    if "input" in given:
        return Printed(_text(given, "input"), _text(given, "output"))
    if "assert" in given:
        return _assertion(_text(given, "assert"))
    if not isinstance(given["args"], list):
        raise ValueError(f"can never be passed: args must be a list, not {given['args']!r:.200}")
    function = _text(given, "call")
    if not _names_a_function(_expression(function)):
        raise ValueError(f"can never be passed: call must name a function, not {function!r:.200}")
    try:
        returns = json.loads(json.dumps(given["returns"]))
        arguments = repr(json.loads(json.dumps(given["args"]), parse_constant=_no_literal))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"can never be passed: args and returns must be JSON: {error}") from error
    return Called(function, arguments, returns)


def _no_literal(name: str) -> Any:
    raise ValueError(f"an argument {name}, which JSON does not know")


def _text(test: dict[str, Any], key: str) -> str:
    value = test[key]
    if isinstance(value, int | float) and not isinstance(value, bool) and key != "assert":
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"can never be passed: {key} must be a text, not {value!r:.200}")
    return value


@functools.lru_cache(maxsize=4096)
def _assertion(text: str) -> Called | Asserted:
    """Parse an assertion with or without the word `assert`, as datasets have both."""
    stripped = text.strip()
    if stripped.startswith(("assert ", "assert(")):
        statement = _parsed(stripped, "exec").body
        if len(statement) != 1 or not isinstance(statement[0], ast.Assert):
            raise ValueError(f"can never be passed: it must be one expression, not {text!r:.200}")
        expression = statement[0].test
        stripped = ast.unparse(expression)
    else:
        expression = _expression(stripped)
    return _as_call(expression) or Asserted(stripped)


def _expression(text: str) -> ast.expr:
    found: ast.expr = _parsed(text.strip(), "eval").body
    return found


@functools.lru_cache(maxsize=4096)
def _parsed(text: str, mode: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the tests' own style
            tree: Any = ast.parse(text, mode=mode)
            compile(tree, "test", mode)
    except _UNREADABLE as error:
        raise ValueError(f"can never be passed: {text!r:.200} is not Python: {error}") from error
    return tree


def _as_call(expression: ast.expr) -> Called | None:
    """Return the call and the value in `f(1, 2) == 3`; None for other expressions."""
    if not isinstance(expression, ast.Compare) or len(expression.ops) != 1:
        return None
    if not isinstance(expression.ops[0], ast.Eq):
        return None
    sides = (expression.left, expression.comparators[0])
    for call, value in (sides, sides[::-1]):
        if isinstance(call, ast.Call) and not call.keywords and _names_a_function(call.func):
            try:
                arguments = repr([ast.literal_eval(one) for one in call.args])
                wanted = ast.literal_eval(value)
                returns = json.loads(json.dumps(wanted))
            except (TypeError, *_UNREADABLE):
                continue
            return Called(ast.unparse(call.func), arguments, returns, bools_are_numbers=True)
    return None


def _names_a_function(expression: ast.expr) -> bool:
    while True:
        if isinstance(expression, ast.Name):
            return True
        if isinstance(expression, ast.Call) and not expression.args and not expression.keywords:
            expression = expression.func
        elif isinstance(expression, ast.Attribute):
            expression = expression.value
        else:
            return False


def is_right(found: Any, test: Called, tolerance: float = 0.0) -> bool:
    """Return True if a returned value, as JSON, is the right one.

    2 equals 2.0; lists equal tuples; the order of keys does not matter; True differs from 1, except
    where an `assert` compares them. Numbers may differ by `tolerance`, absolute or relative to the
    larger one, if one of them is a float.
    """
    return _equal(found, test.returns, test.bools_are_numbers, tolerance)


def _equal(found: Any, wanted: Any, loose: bool, tolerance: float) -> bool:
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(_equal(*both, loose, tolerance) for both in zip(found, wanted, strict=True))
        )
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_equal(found[key], wanted[key], loose, tolerance) for key in wanted)
        )
    if isinstance(found, bool) != isinstance(wanted, bool) and not loose:
        return False
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return _near(found, wanted, tolerance)
    return type(found) is type(wanted) and bool(found == wanted)


def _near(found: float, wanted: float, tolerance: float) -> bool:
    if found == wanted or (found != found and wanted != wanted):  # both are NaN
        return True
    if isinstance(found, int) and isinstance(wanted, int):
        return False
    try:
        return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int beyond float64
        return False
