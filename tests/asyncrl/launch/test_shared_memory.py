"""Shared files of dead runs are removed, those of live runs stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import UserError
from asyncrl.launch import shared_memory


def test_files_of_this_process_and_of_dead_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = ended.pid, os.getppid()
    exchange = shared_memory.exchange_directory(
        shared_memory.local_run_id("my-run", dead), tmp_path
    )
    exchange.mkdir()
    (exchange / "rollouts").touch()
    for owner in (dead, alive, os.getpid()):
        for trainer in ("trainer", "trainer.1", "relay-0", "relay-12.3"):
            name = shared_memory.weights_id(shared_memory.local_run_id("my-run", owner), trainer)
            (tmp_path / f"asyncrl-{name}-weights-0").touch()
    (tmp_path / "asyncrl-notes").touch()
    shared_memory.remove_stale_files()
    assert {path.name for path in tmp_path.iterdir()} == {
        f"asyncrl-my-run-{alive}-trainer-weights-0",
        f"asyncrl-my-run-{alive}-trainer.1-weights-0",
        f"asyncrl-my-run-{alive}-relay-0-weights-0",
        f"asyncrl-my-run-{alive}-relay-12.3-weights-0",
        "asyncrl-notes",
    }
    shared_memory.remove_weights(shared_memory.local_run_id("my-run", alive), "trainer")
    shared_memory.remove_files_of("other-run", alive)
    assert len(list(tmp_path.iterdir())) == 4
    shared_memory.remove_files_of("my-run", alive)
    assert len(list(tmp_path.iterdir())) == 1


def test_files_of_a_process_that_cannot_be_seen_stay_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in another container, with the same memory."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run_id = shared_memory.local_run_id("my-run", ended.pid)
    weights = tmp_path / f"asyncrl-{shared_memory.weights_id(run_id, 'trainer')}-weights-0"
    weights.touch()
    with shared_memory.owned(run_id):
        shared_memory.remove_stale_files()
        assert weights.exists()
        monkeypatch.setattr(shared_memory, "_LOOKED_AT_SECONDS", 0.0)
        with pytest.raises(UserError, match="another run has the files"):
            shared_memory.owned(run_id).__enter__()
    assert [one.name for one in tmp_path.iterdir()] == [weights.name]
    shared_memory.remove_stale_files()
    assert not list(tmp_path.iterdir())


def test_an_owner_that_was_killed_owns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from asyncrl.launch import shared_memory\n"
        "shared_memory.SHARED_MEMORY = Path(sys.argv[1])\n"
        "with shared_memory.owned('my-run-1234567'): print('owned', flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        shared_memory.remove_stale_files()
        assert list(tmp_path.iterdir())
        owner.kill()
    shared_memory.remove_stale_files()
    assert not list(tmp_path.iterdir())
