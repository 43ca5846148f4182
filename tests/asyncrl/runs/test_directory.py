from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from asyncrl_runs import until
from rich.console import Console
from whole_checkpoints import write_whole

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.controller.execute import execute
from asyncrl.errors import UserError
from asyncrl.launch import shared_memory
from asyncrl.launch.identity import status_of
from asyncrl.launch.records import ProcessRecords
from asyncrl.runs import directory, failed_starts
from asyncrl.runs.directory import RunDirectory, find_run, is_alive, read_state
from asyncrl.runs.resuming import checkpoint_settings
from asyncrl.startup.prepare import Prepared
from asyncrl.steering.control_socket import ask
from asyncrl.tasks.prompts import Task
from asyncrl.trainer.base.errors import Superseded
from asyncrl.trainer.checkpoint.format.files import ResumePoint
from asyncrl.trainer.checkpoint.trainer_lease import TrainerLease
from asyncrl.wire.messages.control import StatusRequest


def config_in(path: Path, **sections: object) -> RunConfig:
    run = {"name": "mine", "directory": str(path)}
    return parse_config({"run": run, **sections}, source="the test")


def test_a_name_in_use_is_refused_unless_resumed_or_cleaned(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    made = RunDirectory.create(config, resume=False, clean=False)
    made.close()
    write_whole(made.path / "checkpoints", 1, settings=checkpoint_settings(config))
    with pytest.raises(UserError, match=r"'mine' is in use.*--resume.*--clean.*--set run.name"):
        RunDirectory.create(config, resume=False, clean=False)
    RunDirectory.create(config, resume=True, clean=False).close()
    assert (made.path / "checkpoints" / "step-000001").exists()
    RunDirectory.create(config, resume=False, clean=True).close()
    assert not (made.path / "checkpoints" / "step-000001").exists()


def test_others_read_nothing_of_a_run_unless_its_folder_is_opened(tmp_path: Path) -> None:
    def modes() -> set[str]:
        return {f"{p.stat().st_mode & 0o777:o}" for p in (made.path, *made.path.rglob("*"))}

    os.umask(0o022)
    config = config_in(tmp_path / "runs")
    made = RunDirectory.create(config, resume=False, clean=False)
    made.close()
    write_whole(made.path / "checkpoints", 1, settings=checkpoint_settings(config))
    assert modes() == {"700", "600"}
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o755
    os.umask(0o022)
    made.path.chmod(0o750)
    RunDirectory.create(config, resume=True, clean=False).close()
    assert (made.path / "config.yaml").stat().st_mode & 0o777 == 0o640


def test_a_trainer_of_a_killed_controller_is_fenced_off_before_a_checkpoint_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may live on, on a machine of an agent, and would remove the one that is chosen."""
    config = config_in(tmp_path)
    made = RunDirectory.create(config, resume=False, clean=False)
    made.close()
    write_whole(made.path / "checkpoints", 1, settings=checkpoint_settings(config))
    old = TrainerLease(made.path, made.fence)
    old.check()
    find, fenced = directory.find_resume_point, []

    def choose(*arguments: Any) -> ResumePoint:
        with pytest.raises(Superseded):
            old.check()
        fenced.append(True)
        return find(*arguments)

    monkeypatch.setattr(directory, "find_resume_point", choose)
    again = RunDirectory.create(config, resume=True, clean=False)
    again.close()
    assert fenced
    TrainerLease(made.path, again.fence).check()


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to resume"):
        RunDirectory.create(config_in(tmp_path), resume=True, clean=False)


def test_a_run_whose_steps_cannot_be_read_is_not_resumed_and_not_changed(tmp_path: Path) -> None:
    RunDirectory.create(config_in(tmp_path), resume=False, clean=False).close()
    folder = tmp_path / "mine"
    (folder / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "tokens": 7}\n')
    (folder / "result.json").write_text("{}")
    before = (folder / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"metrics.jsonl.*cannot be resumed.*--set model.path"):
        RunDirectory.create(config_in(tmp_path), resume=True, clean=False)
    assert (folder / "result.json").exists()
    assert (folder / "config.yaml").read_text() == before


def test_a_folder_that_is_no_run_is_never_cleaned(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not the folder of a run"):
        RunDirectory.create(config_in(tmp_path), resume=False, clean=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_what_python_writes_before_a_run_neither_takes_its_name_nor_is_cleaned_away(
    tmp_path: Path,
) -> None:
    config = config_in(tmp_path)
    file = config.directory / "python" / "reward_score.py"
    file.parent.mkdir(parents=True)
    file.write_text("def score(p, r, e): return 1.0")
    RunDirectory.create(config, resume=False, clean=False).close()
    (config.directory / "metrics.jsonl").touch()
    RunDirectory.create(config, resume=False, clean=True).close()
    assert not (config.directory / "metrics.jsonl").exists()
    assert file.exists()


def test_a_start_that_was_killed_before_its_configuration_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine" / "logs").mkdir(parents=True)
    (tmp_path / "mine" / ".lock").touch()
    (tmp_path / "mine" / ".config.yaml.77").write_text("run:")
    RunDirectory.create(config_in(tmp_path), resume=False, clean=False).close()


@pytest.mark.parametrize("content", [b'{"pid": 1, "control_address": "\xff"}', b"[" * 100_000])
def test_a_damaged_state_is_no_state(tmp_path: Path, content: bytes) -> None:
    RunDirectory.create(config_in(tmp_path), resume=False, clean=False).close()
    (tmp_path / "mine" / "run.json").write_bytes(content)
    assert read_state(tmp_path / "mine") is None


def test_a_resumed_run_keeps_its_data_order(tmp_path: Path) -> None:
    RunDirectory.create(config_in(tmp_path), resume=False, clean=False).close()
    changed = config_in(tmp_path, scheduler={"group_size": 4})
    with pytest.raises(UserError, match=r"scheduler.group_size was 8 and is now 4"):
        RunDirectory.create(changed, resume=True, clean=False)
    faster = config_in(tmp_path, trainer={"learning_rate": 1e-3})
    RunDirectory.create(faster, resume=True, clean=False).close()


def test_an_active_run_is_not_touched(tmp_path: Path) -> None:
    made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
    made.write_state()
    assert is_alive(made.path)
    for resume, clean in ((True, False), (False, True)):
        with pytest.raises(
            UserError, match=rf"is active \(process {os.getpid()}\).*asyncrl stop mine"
        ):
            RunDirectory.create(config_in(tmp_path), resume=resume, clean=clean)


def test_what_a_killed_controller_left_is_removed_by_a_resumed_or_deleted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", memory)
    for resume in (True, False):
        made = RunDirectory.create(config_in(tmp_path), resume=False, clean=True)
        sockets = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=tmp_path))
        made.state.control_address = f"ipc://{sockets}/user"
        made.write_state()
        weights = memory / f"asyncrl-mine-{os.getpid()}-trainer.1-weights-0"
        other = memory / f"asyncrl-mine-{os.getppid()}-trainer.1-weights-0"
        weights.touch()
        other.touch()
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        ProcessRecords(made.path).add("generator-0", child.pid)
        made.close()  # as the kernel does when the controller is killed
        assert not is_alive(made.path), "a child holds the lock"
        said: list[str] = []
        RunDirectory.create(
            config_in(tmp_path), resume=resume, clean=not resume, say=said.append
        ).close()
        assert child.wait(timeout=60) == -signal.SIGTERM
        assert f"generator-0 (process {child.pid})" in said[0]
        assert not sockets.exists()
        assert not weights.exists()
        assert other.exists()


def test_a_suspended_run_says_how_to_continue_it(tmp_path: Path) -> None:
    made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        until(
            lambda: (found := status_of(stopped.pid)) is not None and found.is_stopped,
            seconds=60,
            what="the process to stop",
        )
        made.state.pid = stopped.pid
        made.write_state()
        with pytest.raises(UserError, match=rf"is suspended.*kill -CONT {stopped.pid}"):
            RunDirectory.create(config_in(tmp_path), resume=True, clean=False)
    finally:
        stopped.kill()
        stopped.wait()
        made.close()


def test_a_resumed_run_keeps_the_accuracy_it_started_with(tmp_path: Path) -> None:
    made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
    assert made.state.pid == os.getpid()
    made.state.accuracy_before, made.state.evaluation_samples = 0.25, 64
    made.state.ended = "stopped"
    made.write_state()
    made.close()
    resumed = RunDirectory.create(config_in(tmp_path), resume=True, clean=False)
    assert (resumed.state.accuracy_before, resumed.state.evaluation_samples) == (0.25, 64)
    assert (made.state.start, resumed.state.start > 0) == (0, True), "seeds depend on it"
    assert resumed.state.ended is None
    resumed.close()
    fresh = RunDirectory.create(config_in(tmp_path), resume=False, clean=True)
    assert fresh.state.accuracy_before is None
    fresh.close()


def test_runs_are_found_by_name_path_or_age(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no run in .*none yet"):
        find_run(None, tmp_path)
    made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
    assert find_run("mine", tmp_path) == made.path
    assert find_run(str(made.path), Path("elsewhere")) == made.path
    assert find_run(None, tmp_path) == made.path
    with pytest.raises(UserError, match=r"no run 'yours'.*runs there: mine"):
        find_run("yours", tmp_path)


def test_a_mistake_before_the_first_checkpoint_leaves_no_folder(tmp_path: Path) -> None:
    made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
    made.undo()
    made.close()
    assert not made.path.exists()


def test_logs_of_a_failed_start_are_kept_and_the_name_is_free(tmp_path: Path) -> None:
    kept = []
    for number in range(failed_starts.KEPT + 2):
        made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
        (made.path / "logs" / "generator-0.log").write_text(f"why, {number}\n")
        moved = made.undo()
        made.close()
        assert moved is not None
        assert not made.path.exists()
        kept.append(moved)
        os.utime(moved, (number, number))  # the order of age, within one second too
    assert sorted(tmp_path.iterdir()) == sorted(kept[-failed_starts.KEPT :])
    assert (kept[-1] / "logs" / "generator-0.log").read_text() == "why, 4\n"
    with pytest.raises(UserError, match="none yet"):
        find_run(None, tmp_path)
    assert find_run(kept[-1].name, tmp_path) == kept[-1]


def test_a_mistake_after_a_checkpoint_or_on_resume_loses_nothing(tmp_path: Path) -> None:
    made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
    config = config_in(tmp_path)
    write_whole(made.path / "checkpoints", 1, settings=checkpoint_settings(config))
    made.undo()
    made.close()
    before = (made.path / "config.yaml").read_text()
    changed = config_in(tmp_path, trainer={"learning_rate": 1e-3})
    resumed = RunDirectory.create(changed, resume=True, clean=False)
    assert (made.path / "config.yaml").read_text() != before
    resumed.undo()
    resumed.close()
    assert (made.path / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("ended", "words"), [("done", "it is done"), ("stopped", "it was stopped"), (None, "killed")]
)
def test_a_request_to_a_run_that_ended_says_how_it_ended(
    tmp_path: Path, ended: Any, words: str
) -> None:
    made = RunDirectory.create(config_in(tmp_path), resume=False, clean=False)
    made.state.ended = ended
    made.write_state()
    made.close()
    with pytest.raises(
        UserError, match=rf"is not active: .*{words}.*--resume.*asyncrl report mine"
    ):
        ask(made.path, StatusRequest())


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/no-such-folder"])
def test_a_folder_that_cannot_be_written_is_named_with_its_key(place: str) -> None:
    values = {"run": {"directory": place}, "monitoring": {"metrics": False}}
    task = Task(train=[], evaluation=[], stop_tokens=(), tokenizer=None)
    prepared = Prepared(parse_config(values, source="test"), "unused", task)
    with pytest.raises(UserError, match=f"^run.directory: the run's folder {place[:90]}.*cannot"):
        execute(prepared, resume=False, clean=False, console=Console(quiet=True))
