"""The arguments of a reward function, and the values that it may return.

def score(prompt, response, example): ...   the user's columns, `prompt`, `answer` and `row`
def score(prompt, response, row): ...       the user's example exactly as it is in the dataset
def compute_score(data_source, solution_str, ground_truth, extra_info): ...    as in verl
def score(completions, **columns): ...      as in TRL, with lists of one sample

Import-light: worker processes load this file.
"""

import inspect
import math
import reprlib
from collections.abc import Iterable
from socket import gaierror
from typing import Any, Literal

from asyncrl.rewards.protocol import FailureReason

ROW = "row"
"""Name of a third parameter that asks for the unchanged example, and the key that holds it."""


Convention = Literal["example", "row", "verl", "trl"]
"""Way in which a function is called, by the names of its parameters."""
_OF_VERL = ("data_source", "solution_str", "ground_truth")


def convention_of(function: Any) -> Convention:
    """Return how a function is called."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return "example"
    if "completions" in names and "response" not in names:
        return "trl"
    if all(name in names for name in _OF_VERL):
        return "verl"
    return "row" if names[2:3] == [ROW] else "example"


def arguments_for(
    convention: Convention, prompt: str, response: str, example: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments of one call.

    verl's `ground_truth` is the row's `reward_model.ground_truth`, or else the answer. TRL's
    columns are those of the row; a prompt of chat messages makes a completion of them.
    """
    if convention in ("example", "row"):
        return (prompt, response, argument_for(example, row_only=convention == "row")), {}
    row = argument_for(example, row_only=True)
    if convention == "verl":
        model, more = row.get("reward_model"), row.get("extra_info")
        truth = model.get("ground_truth") if isinstance(model, dict) else example.get("answer")
        named = zip(_OF_VERL, (row.get("data_source", ""), response, truth), strict=True)
        return (), {**dict(named), "extra_info": dict(more) if isinstance(more, dict) else {}}
    asked, said = row.get("prompt", prompt), [{"role": "assistant", "content": response}]
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
    chats = isinstance(asked, list)
    return (), {**columns, "prompts": [asked], "completions": [said if chats else response]}


def value_of(convention: Convention, result: Any) -> float | None:
    """Return a result's number; None if the function does not apply. Raises BadValueError."""
    if convention == "verl" and isinstance(result, dict):
        result = result.get("score")
    if convention == "trl":
        values = list(result) if isinstance(result, Iterable) else []
        if len(values) != 1:
            text = _must_return("a list with a number for each completion", result)
            raise BadValueError("not_a_number", text)
        (result,) = values
    return None if result is None else as_number(result)


def argument_for(example: dict[str, Any], *, row_only: bool) -> dict[str, Any]:
    """Return the third argument of one call, a new dict whose values are shared between calls.

    With `row_only` it is the row. Otherwise it has the row's columns, with `prompt` (the question
    as text) and `answer` (`task.answer_field`, a number as text) in place of columns of these
    names, and the row under `row`. Without a row (`arithmetic`), the example takes its place.
    """
    row = example.get(ROW)
    if not isinstance(row, dict):
        row = example
    return dict(row) if row_only else {**row, **example, ROW: dict(row)}


MAX_FLOAT32 = 3.4028234663852886e38
"""Largest finite float32: rewards are float32 from the trainer on."""
_LONGEST_CHAIN = 20
"""Most causes of an error that are followed."""
ABSURD = 1e6
"""Rewards above this cause a warning: advantages are differences of rewards."""


class NoRewardError(Exception):
    """A built-in function cannot give a reward; the message is shown without a traceback."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


class Unavailable(NoRewardError):  # noqa: N818 - says what happened
    """Raised by a user's reward function or environment whose service is down.

    The failure then does not count against the response.
    """

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


def is_unavailable(error: BaseException | None) -> bool:
    """Return True if an error of the user's code comes from a service that cannot be reached.

    That is `Unavailable`, or a refused connection among the error's causes. A broken connection
    does not count: a program of the response may have been at the other end.

    >>> is_unavailable(ConnectionRefusedError()), is_unavailable(ConnectionResetError())
    (True, False)
    """
    for _ in range(_LONGEST_CHAIN):
        if error is None or isinstance(error, Unavailable | ConnectionRefusedError | gaierror):
            return error is not None
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


class BadValueError(NoRewardError):
    """A value is not a reward."""


def as_number(result: Any) -> float:
    """Convert any number (also bool, numpy and torch scalars) to a float.

    Raises BadValueError if it is not one number, or not finite in float32.
    """
    if isinstance(result, str | bytes | bytearray) or not hasattr(result, "__float__"):
        raise BadValueError("not_a_number", _must_return("a number", result))
    try:
        value = float(result)
    except OverflowError as error:  # an int beyond float64
        raise BadValueError("not_finite", _must_return("a finite number", result)) from error
    except (TypeError, ValueError, RuntimeError) as error:  # an array of several numbers
        text = f"{_must_return('a number', result)} ({error})"
        raise BadValueError("not_a_number", text) from error
    return as_float32(value)


def as_float32(value: float, what: str = "a reward must return") -> float:
    """Return the value itself. Raises BadValueError unless it is finite in float32."""
    if not abs(value) <= MAX_FLOAT32:  # NaN too
        limit = " in float32 (at most 3.4e38)" if math.isfinite(value) else ""
        raise BadValueError("not_finite", f"{what} a finite number{limit}, got {value}")
    return value


def _must_return(what: str, result: Any) -> str:
    try:
        shown = f"{type(result).__name__}: {reprlib.repr(result)}"
    except Exception:  # noqa: BLE001 - the user's own __repr__, or an int of 4,301 digits
        shown = f"{type(result).__name__} that cannot be printed"
    return f"a reward must return {what}, got {shown}"
