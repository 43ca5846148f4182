"""The built-in environment `calculator`: a question and a calculator tool. Import-light."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from asyncrl.environments.protocol import Action, StepResult

NAME = "calculator"
_CALL = re.compile(rf"\b{NAME}\b[\s(:]*([0-9+\-*() ]+)")
_NUMBER = re.compile(r"\d+")
_MAX_CHARACTERS = 200
_MAX_VALUE = 10**30
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


_PARAMETERS = {"expression": {"type": "string"}}
_FUNCTION = {
    "name": NAME,
    "description": "Compute with whole numbers: +, - and *.",
    "parameters": {"type": "object", "properties": _PARAMETERS, "required": ["expression"]},
}


class Calculator:
    """Computes up to `calls` expressions for the policy; a turn without a call is its answer."""

    replay = "deterministic"
    tools = ({"type": "function", "function": _FUNCTION},)

    def __init__(self, calls: int = 4) -> None:
        self._calls_left = calls
        self._answer = ""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Keep the row's prompt and remember its `answer`."""
        del seed
        if row.get("answer") is None:
            raise ValueError("calculator: the row needs an `answer`; set task.answer_field")
        self._answer = str(row["answer"]).strip()

    def step(self, action: Action) -> StepResult:
        """Compute, or judge the answer, which is the last number in the turn."""
        expression = _expression(action)
        if expression is not None and self._calls_left > 0:
            self._calls_left -= 1
            return StepResult([{"role": "tool", "content": evaluate(expression)}])
        right = _NUMBER.findall(action.text)[-1:] == [self._answer]
        return StepResult(done=True, reward=float(right))


def evaluate(expression: str) -> str:
    """Evaluate an expression of whole numbers; return `error` if it does not have a value."""
    if len(expression) > _MAX_CHARACTERS:
        return "error"
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return "error"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(value) <= _MAX_VALUE:
            return value
    raise ValueError("not an expression of whole numbers")


def _expression(action: Action) -> str | None:
    for call in action.tool_calls:
        arguments = call.get("arguments")
        if call.get("name") == NAME and isinstance(arguments, dict):
            return str(arguments.get("expression", ""))
    found = _CALL.search(action.text)
    return None if found is None else found.group(1)
