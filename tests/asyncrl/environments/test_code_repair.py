"""`code_repair`: programs run in the sandbox, failures are shown, the reward is for passing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from needed_programs import needs_namespaces

from asyncrl.cores import usable_cores
from asyncrl.environments.code_repair import CodeRepair
from asyncrl.environments.protocol import Action, checked_step
from asyncrl.programs import asking
from asyncrl.sandbox.run import Outcome

pytestmark = needs_namespaces()
WRONG = "def f(a, b): return a-b+3"
TESTS = [{"call": "f", "args": [2, 5], "returns": 10}, {"call": "f", "args": [7, 3], "returns": 13}]


def act(text: str) -> Action:
    return Action(text, [1], {"role": "assistant", "content": text})


def begun(**args: Any) -> CodeRepair:
    environment = CodeRepair(**args)
    shown = environment.reset({"program": WRONG, "tests": TESTS}, 0)
    assert shown == f"repair {WRONG}\nf(2, 5) is 0 not 10"
    return environment


def test_failures_are_shown_and_a_right_program_ends_it() -> None:
    environment = begun()
    first = checked_step(environment.step(act("def f(a, b): return a+b+2")))
    assert (first.observation, first.done, first.reward) == ("f(2, 5) is 9 not 10", False, 0.0)
    fenced = "so\n```python\ndef f(a, b):\n    return a + b + 3\n```"
    last = checked_step(environment.step(act(fenced)))
    assert (last.observation, last.done, last.reward) == ("correct", True, pytest.approx(0.9))


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("def f(a, b) return", "f(2, 5) is error not 10"),
        ("def f(a, b): return b'x'", "f(2, 5) is error not 10"),
        ("def f(a, b): return 10 if a == 2 else 1/0", "f(7, 3) is error not 13"),
        ("def f(a, b): return '10'", "f(2, 5) is '10' not 10"),
        ("import os\nos._exit(0)", "f(2, 5) is error not 10"),
        ("def f(a, b):\n    while True: pass", "f(2, 5) is error not 10"),
        ("print(10)\nprint(13)\ndef f(a, b): return 0", "f(2, 5) is 0 not 10"),
    ],
)
def test_what_a_program_does_costs_only_itself(program: str, failure: str) -> None:
    environment = begun(attempts=1, seconds=1)
    result = checked_step(environment.step(act(program)))
    assert (result.observation, result.done, result.reward) == (failure, True, 0.0)


def all_pass(number: int) -> dict[str, Any]:
    return {"program": f"def f(a, b): return a+b+3 # {number}", "tests": TESTS}


def answered(*values: int) -> Outcome:
    """As the script in the sandbox says it."""
    lines = [json.dumps(json.dumps({"value": value})) + "\n" for value in values]
    return Outcome(stdout="".join(lines).encode())


def test_nothing_that_a_program_writes_ends_the_step_and_little_of_it_is_kept() -> None:
    written = ["[" * 100_000, '{"value": ' * 50_000, '{"value": %s}' % ("9" * 5000), "\xff"]
    for text in written:
        program = f"import os\nfor n in range(3, 64):\n  try: os.write(n, {text!r}.encode())"
        failing = begun().step(act(f"{program}\n  except OSError: pass\ndef f(a, b): return 0"))
        assert failing.observation == "f(2, 5) is error not 10"
    long = begun().step(act("def f(a, b): return 'x' * 200_000"))
    assert len(long.observation) < 300


def test_a_program_that_the_clock_has_ended_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been busy."""
    endings: list[Outcome] = [Outcome("wall_seconds"), answered(10, 10)]
    monkeypatch.setattr(asking, "run", lambda *_, **__: endings.pop(0))
    assert CodeRepair().reset(all_pass(-1), 0).endswith("f(2, 5) is error not 10")
    for _ in range(2):  # the second time it is remembered
        assert CodeRepair().reset(all_pass(-1), 0).endswith("f(7, 3) is 10 not 13")


def test_programs_take_turns_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = usable_cores()
    full, lock, running, most = threading.Barrier(cores), threading.Lock(), 0, 0

    def fake(*_command: Any, **_options: Any) -> Outcome:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(60)  # so many do run at once
        with lock:
            running -= 1
        return answered(10, 13)

    monkeypatch.setattr(asking, "run", fake)
    with ThreadPoolExecutor(3 * cores) as threads:
        shown = list(
            threads.map(lambda row: CodeRepair().reset(row, 0), map(all_pass, range(3 * cores)))
        )
    assert all(one.endswith("all tests pass") for one in shown)
    assert most == cores


def test_a_row_without_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="a row needs `program`, a text, and `tests`"):
        CodeRepair().reset({"program": WRONG, "tests": [{"assert": "f(1, 2)"}]}, 0)
