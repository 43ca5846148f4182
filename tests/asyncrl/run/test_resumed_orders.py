"""Orders of an earlier start of the run: which stay in force, and what the user is told."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from typer.testing import CliRunner

from asyncrl.cli.entry import app
from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.controller.scaling import Scaling, arrivals_of
from asyncrl.errors import UserError
from asyncrl.monitoring.records.jsonl import JsonlWriter
from asyncrl.runs.directory import RunDirectory
from asyncrl.steering.user_commands import ORDERS, with_orders
from asyncrl.web.orders import SetArguments, set_request
from asyncrl.wire.messages.control import OrderRecord
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation

RATE = "trainer.learning_rate"
AGENTS = {"kind": "agents", "agents": {"key_file": "k"}}


def config(path: Path, **sections: Any) -> RunConfig:
    run = {"name": "mine", "directory": str(path)}
    return parse_config({"run": run, **sections}, source="the test")


def ordered(path: Path, order: str, step: int, before: Any = UNSET, **arguments: Any) -> None:
    record = OrderRecord(
        order=order, arguments=arguments, step=step, time=0.0, effect="", before=before
    )
    with closing(JsonlWriter(path / "mine" / ORDERS)) as writer:
        writer.append(record)


def resumed(
    path: Path, *overrides: str, said: list[str] | None = None, **sections: Any
) -> RunConfig:
    say = ([] if said is None else said).append
    return with_orders(config(path, **sections), overrides, say)


def test_a_command_that_is_repeated_takes_no_order_back_and_another_value_does(
    tmp_path: Path,
) -> None:
    ordered(tmp_path, "set", 5, 1e-5, key=RATE, value="1.0e-7")
    ordered(tmp_path, "set", 7, 1e-5, key=RATE, value="2.0e-7")
    said: list[str] = []
    again = resumed(tmp_path, f"{RATE}=1e-5", said=said, trainer={"learning_rate": 1e-5})
    assert [again.at(step).trainer.learning_rate for step in (4, 5, 7)] == [1e-5, 1e-7, 2e-7]
    assert said == [
        f"the order `asyncrl set {RATE}={value}` of step {step} stays in force: --set {RATE} names "
        "a value from before it"
        for value, step in (("1.0e-7", 5), ("2.0e-7", 7))
    ]
    said.clear()
    other = resumed(tmp_path, f"{RATE}=3e-5", said=said, trainer={"learning_rate": 3e-5})
    assert other.run.changes == {}
    assert said[0] == (
        f"the order `asyncrl set {RATE}=1.0e-7` of step 5 is taken back: --set {RATE} names "
        "another value"
    )
    ordered(tmp_path, "set", 9, 3e-5, key=RATE, value="4.0e-7")  # in the run that was resumed so
    third = resumed(tmp_path, f"{RATE}=3e-5", trainer={"learning_rate": 3e-5})
    assert third.run.changes == {9: {RATE: 4e-7}}


def test_an_order_of_an_earlier_version_is_taken_back_and_that_is_said(tmp_path: Path) -> None:
    ordered(tmp_path, "set", 5, key=RATE, value="1.0e-7")
    said: list[str] = []
    assert resumed(tmp_path, f"{RATE}=1e-5", said=said).run.changes == {}
    assert "is taken back" in said[0]
    assert resumed(tmp_path).run.changes == {5: {RATE: 1e-7}}
    said.clear()
    assert resumed(tmp_path, "run.changes={}", said=said).run.changes == {}
    assert said[0].endswith("is taken back: --set names run.changes")


@pytest.mark.parametrize("key", [f" {RATE}", f"{RATE} "])
def test_a_key_with_spaces_is_the_key(tmp_path: Path, key: str) -> None:
    assert set_request(SetArguments(key=key, value=1e-7)).key == RATE
    ordered(tmp_path, "set", 5, key=key, value="1.0e-7")  # by an earlier version
    assert resumed(tmp_path).run.changes == {5: {RATE: 1e-7}}


def test_a_mode_that_is_taken_back_leaves_nothing(tmp_path: Path) -> None:
    ordered(tmp_path, "set", 5, "verify", key="scheduler.on_update", value="keep")
    begun = {"on_update": "verify", "max_runahead_groups": 16}
    own = resumed(tmp_path, scheduler=begun)
    assert own.at(5).scheduler.on_update == "keep"
    named = {"on_update": "recompute", "max_runahead_groups": None}
    run = {**own.run.model_dump(), "directory": str(tmp_path)}
    copy = parse_config({"run": run, "scheduler": named}, source="the run's own copy")
    assert copy.run.changes
    back = with_orders(copy, ["scheduler.on_update=recompute"], lambda _: None)
    assert back.run.changes == {}


def test_with_agents_a_number_bounds_those_that_join_and_asks_for_no_more(tmp_path: Path) -> None:
    """The Compose file names the number that the run begins with at each start."""
    ordered(tmp_path, "scale", 5, 1, generators=4)
    for named in ((), ("launcher.generators=2",)):
        again = resumed(tmp_path, *named, launcher={**AGENTS, "generators": 2})
        assert again.launcher.generators == 2, "nobody waits for four agents"
    fleet: Any = SimpleNamespace(config=again.launcher, is_ready=None)
    agents: Any = SimpleNamespace(roster=SimpleNamespace())
    scaling = Scaling(fleet, *[None] * 2)  # type: ignore[arg-type]
    arrivals_of(agents, fleet, scaling, again.directory, lambda: None, print)
    assert scaling.ordered == 4
    ordered(tmp_path, "scale", 6, 1, generators=1)
    said: list[str] = []
    again = resumed(tmp_path, "launcher.generators=2", said=said,
                    launcher={**AGENTS, "generators": 2})  # fmt: skip
    assert again.launcher.generators == 1
    assert said == ["the last `asyncrl scale` allows 1 generator(s): no more begin"]


def test_a_number_stays_in_force_if_the_command_is_repeated(tmp_path: Path) -> None:
    ordered(tmp_path, "scale", 5, 1, generators=3)
    assert resumed(tmp_path, "launcher.generators=1").launcher.generators == 3
    other = resumed(tmp_path, "launcher.generators=2", launcher={"generators": 2})
    assert other.launcher.generators == 2


def test_a_complete_run_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object) -> None:
        raise UserError("it would begin")

    monkeypatch.setattr("asyncrl.startup.prepare.prepare", prepare)
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{name: mine, directory: {tmp_path}}}\n")
    run = RunDirectory.create(load_config(file, []), resume=False, clean=False)
    run.state.ended = "done"
    run.write_state()
    run.close()
    for words in ("--resume", "--continue"):
        done = CliRunner().invoke(app, ["run", str(file), words])
        assert done.exit_code == 0
        assert "is complete; there is nothing to do. --set run.steps=N trains" in done.output
    more: tuple[tuple[str, ...], ...] = (("--set", "run.steps=200"), ("--changed-data",))
    for words in (*more, ("--resume-from", "3")):
        again = CliRunner().invoke(app, ["run", str(file), "--resume", *words])
        assert str(again.exception) == "it would begin"
    incomplete = {"held_out": SetEvaluation(prompts=2, samples=0, accuracy=None, unscored=4)}
    record = EvaluationRecord(step=100, when="after", time=1.0, sets=incomplete)
    monkeypatch.setattr("asyncrl.cli.training._evaluations", lambda _: [record])
    again = CliRunner().invoke(app, ["run", str(file), "--resume"])
    assert str(again.exception) == "it would begin", "the newest weights are measured again"


def test_orders_that_cannot_be_read_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object) -> None:
        raise AssertionError("the run would begin")

    monkeypatch.setattr("asyncrl.startup.prepare.prepare", prepare)
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{name: mine, directory: {tmp_path}}}\n")
    RunDirectory.create(load_config(file, []), resume=False, clean=False).close()
    orders = tmp_path / "mine" / ORDERS
    orders.mkdir()
    done = CliRunner().invoke(app, ["run", str(file), "--resume"])
    assert isinstance(done.exception, UserError)
    assert f"{orders} cannot be read (Is a directory)" in str(done.exception)
    orders.rmdir()
    orders.write_text("damaged\n")
    ordered(tmp_path, "set", 5, key=RATE, value="1.0e-7")
    said: list[str] = []
    assert resumed(tmp_path, said=said).run.changes == {5: {RATE: 1e-7}}
    assert f"{orders}, line 1: " in said[0]
    assert said[0].endswith("the order of this line is left out")
