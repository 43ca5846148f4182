"""`asyncrl logs|samples|list|compare|watch|set`, on a run's files alone."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from fake_clock import FakeClock
from msgspec.structs import replace
from sample_records import written
from synthetic_run import make_run
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.monitoring.records.samples import RecentSamples, read_samples
from asyncrl.monitoring.report.compare import comparison_page, differences, table
from asyncrl.monitoring.report.data import load_run
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.runs.log_reading import LogReader, find_logs, follow
from asyncrl.steering import watching
from asyncrl.wire.errors import NoReply
from asyncrl.wire.messages import control


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        make_run(tmp_path / name)
    config = tmp_path / "second" / "config.yaml"
    config.write_text(
        config.read_text().replace("max_off_policy_steps: 1", "max_off_policy_steps: 4")
    )
    (tmp_path / "first" / "logs").mkdir()
    (tmp_path / "first" / "logs" / "trainer.log").write_text("one\ntwo\x1b[2J\nthree\n")
    (tmp_path / "first" / "logs" / "generator-0.log").write_text("engine ready\n")
    return tmp_path


def call(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_logs_of_one_process_and_of_all(runs: Path) -> None:
    place = ("--runs", str(runs))
    assert call("logs", "first", "trainer", "-n", "2", *place) == "two[2J\nthree\n"
    everything = call("logs", "first", *place).splitlines()
    assert everything[0] == "generator-0 | engine ready"
    assert everything[-1] == "trainer | three"
    with pytest.raises(
        UserError, match=r"does not have a log of process 'trainr'. Did you mean 'trainer'"
    ):
        call("logs", "first", "trainr", *place)
    assert "three" in call("logs", "-f", "first", "trainer", *place), "the run is over"
    with (runs / "first" / "logs" / "trainer.log").open("a") as log:
        log.write("four\nFatal: the last wo")  # of a process that was killed
    for words in (["logs"], ["logs", "-f"]):
        assert call(*words, "first", "trainer", "-n", "2", *place) == "four\nFatal: the last wo\n"


def test_what_is_added_is_followed_without_loss(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "trainer.log"
    log.write_text("old\nhalf")
    reader = LogReader(lambda: find_logs(tmp_path, None), lines=1)
    rounds = iter(["", "half a line\nnew\n", "again\n"])

    def is_over() -> bool:
        text = next(rounds, None)
        if text:  # the last one is of another process of that name
            log.write_text(text if text == "again\n" else f"old\n{text}")
        return text is None

    found = [line for _, line in follow(reader, is_over)]
    assert found == ["old", "half a line", "new", "again"]


def test_samples_show_where_tokens_come_from_without_colours_too(runs: Path) -> None:
    text = call("samples", "first", "-n", "2", "--runs", str(runs))
    assert text.count("reward ") == 2
    assert re.search(r"\[[^]]+\]", text.split("\n\n", 1)[1]), "drafted tokens stand in brackets"
    run = runs / "first"
    recent = RecentSamples(run / "recent" / "generator-0.jsonl")
    for step in (90, 91):
        sample = read_samples(run / "samples.jsonl")[0]
        recent.append(replace(sample, step=step, sample_id="7.1", rewards={"a": 1.0, "b": 0.25}))
    recent.close()
    text = call("samples", "first", "-n", "1", "--runs", str(runs))
    assert "step 91, sample 7.1" in text, "the report's samples end at an earlier step"
    assert "(a 1.00, b 0.25)" in text
    written(run / "samples", steps=93)  # run.log_samples
    text = call("samples", "first", "-n", "5", "--runs", str(runs))
    assert re.findall(r"step \d+, sample \d+\.\d", text) == [
        f"step {one}" for one in ("91, sample 91.1", "91, sample 91.0", "91, sample 7.1",
                                  "92, sample 92.1", "92, sample 92.0")
    ]  # fmt: skip
    assert "tokens: 1 sampled, 1 drafted, 0 verified" in text
    for path in (*run.rglob("samples/*.jsonl"), *run.rglob("recent/*"), run / "samples.jsonl"):
        path.unlink()
    with pytest.raises(UserError, match="does not have samples yet"):
        call("samples", "first", "--runs", str(runs))


def test_runs_are_listed_with_what_became_of_them(runs: Path) -> None:
    lines = call("list", "--runs", str(runs)).splitlines()
    assert lines[0].split() == ["run", "state", "step", "reward", "accuracy"]
    assert {line.split()[0] for line in lines[1:]} == {"first", "second"}
    assert all(" of " in line for line in lines[1:])
    assert "there are no runs in" in call("list", "--runs", str(runs / "nowhere"))


def test_runs_are_compared_by_results_settings_and_curves(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    text = call("compare", "first", "second", "--html", str(page), "--runs", str(runs))
    assert "reward, last 10 steps" in text
    found = [load_run(runs / name) for name in ("first", "second")]
    (row,) = [one for one in differences(found) if one.name.endswith("max_off_policy_steps")]
    assert row.values[1] == "4"
    assert {len(one.values) for one in table(found)} == {2}
    html = page.read_text()
    assert html == comparison_page(found)
    assert html.count("<svg") == 6
    assert "<script" not in html
    with pytest.raises(UserError, match="2 to 12 runs, not 1"):
        call("compare", "first", "--runs", str(runs))


def test_the_status_of_an_ended_run_is_an_answer(runs: Path) -> None:
    lines = call("status", "first", "--runs", str(runs)).splitlines()
    assert lines[0].startswith("arithmetic-demo: was killed, 60 of 60 steps")
    assert "accuracy before training 0.664, after 0.859" in lines[1]
    assert "tokens/s" not in " ".join(lines), "it has no speed any more"
    assert "so far" not in " ".join(lines)
    assert lines[-2].startswith("continue it with: ")
    assert "report" in lines[-1]
    status = json.loads(call("status", "first", "--json", "--runs", str(runs)))
    assert (status["phase"], status["step"]) == ("was killed", 60)


def test_a_run_that_ended_is_not_watched_and_takes_no_order(runs: Path) -> None:
    for words in (
        ["watch", "first"],
        ["drain", "first"],
        ["set", "first", "trainer.learning_rate=1"],
    ):
        with pytest.raises(UserError, match="is not active"):
            call(*words, "--runs", str(runs))
    with pytest.raises(UserError, match="no run 'frist'"):
        call("checkpoint", "frist", "--runs", str(runs))
    with pytest.raises(UserError, match=r"write it as asyncrl set \[RUN\] KEY=VALUE"):
        call("set", "trainer.learning_rate", "--runs", str(runs))


class FakeLine:
    """A connection to a controller that says what it is told to; None: nothing in time."""

    def __init__(self, says: list[control.Reply | None]) -> None:
        self._says = says
        self.asked = 0
        self.closed = False

    async def send(self, _request: object) -> None:
        self.asked += 1

    async def receive_within(self, _seconds: float, *, what: str) -> control.Reply:
        said = self._says.pop(0) if self._says else None
        if said is None:
            raise NoReply(what)
        return said

    def close(self) -> None:
        self.closed = True


def test_a_silent_controller_is_asked_again_on_another_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as it is silent, hours too."""
    opened: list[FakeLine] = []
    said: list[str] = []
    rounds = 1200  # more than the depth of calls that Python allows

    def open_line(_run: Path) -> FakeLine:
        answers = len(opened) == rounds
        opened.append(FakeLine([control.ViewReply({"step": 5})] if answers else []))
        return opened[-1]

    monkeypatch.setattr(watching, "open_line", open_line)
    monkeypatch.setattr(watching, "is_alive", lambda _run: True)
    shown = asyncio.run(watching.Watching(tmp_path).view(said.append))
    assert shown == RunView(step=5)
    assert len(said) == rounds
    assert all(line.closed and line.asked == 1 for line in opened[:-1])
    monkeypatch.setattr(watching, "is_alive", lambda _run: False)
    assert asyncio.run(watching.Watching(tmp_path).view(said.append)) is None


def test_a_watcher_asks_rarely_and_says_why_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    views = [control.ViewReply({"step": step}) for step in range(60)]
    line = FakeLine([*views, control.Refused("too many watch")])
    monkeypatch.setattr(watching, "open_line", lambda _run: line)
    monkeypatch.setattr(watching, "monotonic", clock)

    async def check() -> None:
        found = watching.Watching(tmp_path)
        for step in range(60):
            clock.now = float(step)
            assert await found.view(print) == RunView(step=step)
        assert line.asked == 60 / watching.ASK_SECONDS, "views come without being asked for"
        with pytest.raises(AsyncrlError, match="too many watch"):
            await found.view(print)

    asyncio.run(check())
