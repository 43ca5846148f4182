"""Python functions, and classes in the shape of TRL's `environment_factory`, as environments."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments import rows
from asyncrl.environments.protocol import (
    Action,
    StepResult,
    checked_reset,
    checked_step,
    traits_of,
)
from asyncrl.environments.registry import load_factory
from asyncrl.errors import RewardError

TOOLS = '''
import asyncio
notes = []
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b
def fail(reason: str) -> str:
    """Never works."""
    raise RuntimeError(reason)
async def later(a: int) -> dict:
    """Wait."""
    await asyncio.sleep(0)
    return {"a": a}
def untyped(a):
    return a
def remember(text: str) -> None:
    """Keep a note."""
    notes.append(text)
def recall() -> list[str]:
    """All notes."""
    return notes
def long(length: int, character: str = "x") -> str:
    """Long."""
    return "<" + character * length + ">"
def leave() -> None:
    """Leaves."""
    raise SystemExit(3)
class Later:
    """A callable that is asynchronous, which its type alone says."""
    __name__ = "called_later"
    async def __call__(self, a: int) -> int:
        return a
called_later = Later()
class Strict:
    """The columns of its dataset, and no others."""
    def reset(self, prompt, solution):
        self.solution = solution
        return " Go."
    def answer(self, text: str) -> bool:
        """Answer.

        Args:
            text: it.
        """
        return text == self.solution
number = 3
class Counter:
    """The shape of TRL: reset, tools, get_reward."""
    def reset(self, start=0, **row):
        self.total = start
        return f" Start: {start}."
    def increase(self, by: int) -> str:
        """Increase the counter.

        Args:
            by: how much.
        """
        self.total += by
        return str(self.total)
    def _private(self): ...
    @property
    def broken(self):
        raise AssertionError("properties are not looked at")
    def get_reward(self) -> float:
        return self.total / 10
class Waiting(Counter):
    async def increase(self, by: int) -> str:
        """Increase the counter.

        Args:
            by: how much.
        """
        await asyncio.sleep(0)
        self.total += by
        return str(self.total)
    async def get_reward(self) -> float:
        return self.total / 10
class NoTools:
    def reset(self, **row): ...
'''


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(TOOLS)
    return str(path)


def calling(name: str, **arguments: Any) -> Action:
    call = {"id": "abc123def", "name": name, "arguments": arguments}
    return Action("text", [1], {"role": "assistant", "content": "text"}, [call])


ANSWER = Action("4", [4], {"role": "assistant", "content": "4"})


def stepped(environment: Any, action: Action) -> StepResult:
    result = environment.step(action)
    return checked_step(asyncio.run(result) if inspect.isawaitable(result) else result)


def content(environment: Any, action: Action) -> str:
    (message,) = stepped(environment, action).observation  # type: ignore[misc]
    assert message["role"] == "tool"  # type: ignore[index]
    return str(message["content"])  # type: ignore[index]


def test_functions_are_tools_and_a_turn_without_a_call_ends(source: str) -> None:
    environment = load_factory(f"python_tools:{source}:add,{source}:fail", {})()
    assert checked_reset(environment.reset({"prompt": "3+1?"}, 0)) is None
    traits = traits_of(environment)
    assert [tool["function"]["name"] for tool in traits.tools] == ["add", "fail"]
    assert traits.tools[0]["function"]["parameters"]["required"] == ["a"]
    assert (traits.replay, traits.restores) == ("recorded", False)
    assert content(environment, calling("add", a=3)) == "4"
    assert "error" in content(environment, calling("add", a="three"))
    assert "no tool 'subtract'" in content(environment, calling("subtract", a=3))
    assert content(environment, calling("fail", reason="broken")) == "error: RuntimeError: broken"
    assert stepped(environment, ANSWER) == StepResult([], done=True)


def test_async_functions_are_awaited(source: str) -> None:
    environment = load_factory(f"python_tools:{source}:add,{source}:later", {"replay": None})()
    assert traits_of(environment).goes_back is False
    assert content(environment, calling("later", a=3)) == '{"a":3}'
    assert content(environment, calling("add", a=3, b=4)) == "7"


@pytest.mark.parametrize(
    ("names", "args", "message"),
    [
        ("SOURCE:untyped", {}, "needs a type hint"),
        ("SOURCE:number", {}, "is a int, not a function"),
        ("SOURCE:ad", {}, "Did you mean 'add'"),
        ("SOURCE:add,SOURCE:add", {}, "two tools are called 'add'"),
        ("SOURCE:add", {"replay": "maybe"}, "must be one of deterministic, recorded or null"),
        ("SOURCE:add", {"reply": None}, "does not take reply; it takes replay"),
    ],
)
def test_what_cannot_work_is_refused(
    source: str, names: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        load_factory(f"python_tools:{names}".replace("SOURCE", source), args)


@pytest.mark.parametrize("name", ["Counter", "Waiting"])
def test_a_class_for_trl_is_an_environment(source: str, name: str) -> None:
    environment = load_factory(f"trl:{source}:{name}", {})()
    row = {"prompt": "Count to 5.", "start": 2}
    reset = environment.reset(row, 0)
    reset = asyncio.run(reset) if inspect.isawaitable(reset) else reset
    assert checked_reset(reset) == [{"role": "user", "content": "Count to 5. Start: 2."}]
    traits = traits_of(environment)
    assert [tool["function"]["name"] for tool in traits.tools] == ["increase"]
    assert traits.replay == "deterministic"
    first, second = stepped(environment, calling("increase", by=3)), stepped(environment, ANSWER)
    assert (first.done, second.done) == (False, True)
    assert first.reward + second.reward == pytest.approx(0.5)  # what get_reward says at the end
    assert first.reward == pytest.approx(0.5)  # so that a sample that is cut off has it


def test_a_reward_asked_once_is_that_of_the_end(source: str) -> None:
    environment = load_factory(f"trl:{source}:Counter", {"score": "end"})()
    environment.reset({}, 0)
    assert stepped(environment, calling("increase", by=3)).reward == 0
    assert stepped(environment, ANSWER).reward == pytest.approx(0.3)


def test_a_class_without_tools_is_refused(source: str) -> None:
    with pytest.raises(RewardError, match="has no public method"):
        load_factory(f"trl:{source}:NoTools", {})


def test_the_rows_of_an_environment_are_printed_if_it_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "class Own:\n"
        "    @staticmethod\n"
        "    def rows():\n"
        "        yield {'prompt': 'one', 'number': 1}\n"
        "    def reset(self, row, seed): ...\n"
        "    def step(self, action): ...\n"
    )
    monkeypatch.setattr("sys.argv", ["rows", f"{source}:Own"])
    rows.main()
    assert json.loads(capsys.readouterr().out) == {"prompt": "one", "number": 1}
    for name, message in (("calculator", "does not have rows"), ("calculater", "Did you mean")):
        monkeypatch.setattr("sys.argv", ["rows", name])
        with pytest.raises(SystemExit, match=message):
            rows.main()


def test_functions_of_one_file_share_what_it_holds(source: str) -> None:
    environment = load_factory(f"python_tools:{source}:remember,{source}:recall", {})()
    assert content(environment, calling("remember", text="one")) == "null"
    assert content(environment, calling("recall")) == '["one"]'


def test_a_long_result_is_shortened_and_says_so(source: str) -> None:
    name = f"python_tools:{source}:long"
    result = content(load_factory(name, {})(), calling("long", length=100_000))
    assert result == "<" + "x" * 4999 + "\n[90002 characters left out]\n" + "x" * 4999 + ">"
    few = load_factory(name, {"max_result_characters": 10})()
    assert content(few, calling("long", length=8)) == "<xxxxxxxx>"
    assert content(few, calling("long", length=9)) == "<xxxx\n[1 characters left out]\nxxxx>"
    with pytest.raises(RewardError, match="must be a whole number from 1, got 0"):
        load_factory(name, {"max_result_characters": 0})


def test_what_cannot_be_encoded_is_written_out(source: str) -> None:
    environment = load_factory(f"python_tools:{source}:long", {})()
    half = calling("long", length=1, character="\udce4")  # of a file that is not UTF-8
    assert content(environment, half) == "<\\udce4>"


def test_what_leaves_or_is_asynchronous_without_saying_so_is_answered(source: str) -> None:
    environment = load_factory(f"python_tools:{source}:leave,{source}:called_later", {})()
    assert content(environment, calling("leave")) == "error: SystemExit: 3"
    assert content(environment, calling("called_later", a=5)) == "5"


def test_a_class_for_trl_gets_the_columns_of_the_dataset(source: str) -> None:
    environment = load_factory(f"trl:{source}:Strict", {})()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}]
    own = {"prompt": messages, "solution": "4"}
    row = {**own, "prompt": "2+2?", "answer": "4", "row": own}  # as workers get it
    assert environment.reset(row, 0) == [messages[0], {"role": "user", "content": "2+2? Go."}]
    assert content(environment, calling("answer", text="4")) == "true"
