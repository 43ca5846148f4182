"""A run whose processes are killed while environments answer: nothing is lost or mixed up."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import held_world
import pytest
from asyncrl_runs import CommandLine, until, worst_mismatch
from held_world import TURNS, World, answer_to
from trace_collector import Collector, collecting
from transformers import AutoTokenizer
from whole_checkpoints import truncate

from asyncrl.monitoring.metrics.discovery import targets_file
from asyncrl.monitoring.records.group_account import read_account
from asyncrl.monitoring.records.trained_samples import TrainedSample, read_trained_samples
from asyncrl.runs.directory import read_state
from asyncrl.steering.control_socket import ask
from asyncrl.wire.messages import control
from asyncrl.wire.messages.unfinished_samples import read_index

pytestmark = pytest.mark.slow

STOPS = "aeiou"
LENGTH = 15
"""Tokens of an answer."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "world")
    yield world
    (world.folder / "hold").unlink(missing_ok=True)


@pytest.mark.usefixtures("_forked_runs")
def test_every_process_is_killed_while_environments_answer_and_each_group_is_trained_once(
    command_line: CommandLine, world: World
) -> None:
    """Killed are a worker of environments, the trainer, the generator, and the controller.

    It is resumed, an order is given, a generator is stopped, and the controller is killed again.
    That generator remains; the last resume ends it, and begins from the newest whole checkpoint.
    The order holds from its step again. A collector of traces answers nothing and then ends: it is
    not waited for.
    """
    settings: dict[str, object] = {
        "environment__name": f"{held_world.__file__}:Held",
        "environment__args": json.dumps({"folder": str(world.folder)}),
        "environment__workers": 2,
        "environment__step_timeout_seconds": 600,
        "rewards__functions": "[]",
        "sampling__stop": json.dumps(list(STOPS)),
        "sampling__max_tokens": 80,
        "engine__max_model_len": 160,
        "trainer__checkpoint_every": 2,
        "trainer__keep_checkpoints": 16,
        "run__log_samples": "jsonl",
        "run__log_sample_tokens": True,
    }
    command_line.phase("a collector of traces answers nothing, and ends")
    with collecting() as collector:
        collector.hold()
        process = command_line.start(run__steps=4000, **settings, **traced(collector))
        command_line.wait_for_steps(5)
        until(lambda: collector.requests, seconds=200, what="spans")

    command_line.phase("a worker of environments and the trainer are killed")
    world.hold()
    killed = {min(waiting_workers(world))}
    os.kill(*killed, signal.SIGKILL)
    gone(killed, "a worker")
    generators = command_line.children("generator")
    os.kill(command_line.children("trainer")[0], signal.SIGKILL)
    until(lambda: "trainer.1" in watched(command_line), seconds=200, what="another trainer")
    world.release()
    command_line.wait_for_steps(command_line.steps() + 3)
    assert watched(command_line) == ["controller", "generator-0", "trainer.1"]
    assert command_line.children("generator") == generators, "generators continue"

    command_line.phase("the generator is killed")
    world.hold()
    workers = waiting_workers(world)
    os.kill(command_line.children("generator")[0], signal.SIGKILL)
    gone(workers, "the environments of a killed generator")
    killed |= workers
    assert waiting_workers(world).isdisjoint(killed), "those of another generator"
    world.release()
    command_line.wait_for_steps(command_line.steps() + 2)

    command_line.phase("the run is killed")
    world.hold()
    workers = waiting_workers(world)
    process.kill()
    said = " ".join(process.communicate(timeout=120)[0].split())
    for fault in ("trainer was killed by SIGKILL", "generator-0 was killed by SIGKILL"):
        assert fault in said
    assert "started trainer.1 in place of trainer, from the checkpoint of step" in said
    gone(workers, "the environments of a killed run")
    killed |= workers
    until(
        lambda: not command_line.children("generator") + command_line.children("trainer"),
        seconds=120,
        what="the processes of a killed run to end",
    )
    world.release()

    command_line.phase("it is resumed and killed again, with a stopped generator and an order")
    process = command_line.start("--resume", run__steps=4000, **settings)
    command_line.wait_for_steps(command_line.steps() + 3)
    (stopped,) = command_line.children("generator")
    os.kill(stopped, signal.SIGSTOP)
    order = ask(command_line.folder, control.SetRequest("trainer.learning_rate", "1e-5"))
    assert isinstance(order, control.Accepted)
    assert order.step is not None
    state = read_state(command_line.folder)
    assert state is not None
    sockets = Path(state.control_address.removeprefix("ipc://")).parent
    process.kill()
    process.communicate(timeout=120)
    until(
        lambda: not command_line.children("trainer"),
        seconds=120,
        what="the trainer to end with its run",
    )
    assert command_line.children("generator") == [stopped]
    assert sockets.is_dir()
    killed |= {one["pid"] for one in world.notes() if Path(f"/proc/{one['pid']}").exists()}

    command_line.phase("it is resumed from the newest whole checkpoint, to its end")
    saved = sorted((command_line.folder / "checkpoints").glob("step-*"))
    # What was delivered may have been trained since the order; those checkpoints are broken, too.
    broken = [one for one in saved if steps_of(one) >= order.step] or saved[-1:]
    for one in broken:
        truncate(saved.pop(saved.index(one)) / "state" / "training-00000-00001.safetensors")
    before = command_line.metrics()
    files = (command_line.folder / "unfinished" / saved[-1].name).glob("*.bin")
    unfinished = sum(len(read_index(file).places) for file in files)
    total = max(len(before), order.step) + 4
    done = command_line.run("--resume", run__steps=total, **settings)
    assert done.returncode == 0, done.stdout
    output = " ".join(done.stdout.split())
    assert f"left behind: generator-0 (process {stopped})" in output
    assert "00001.safetensors is truncated: " in output
    assert f"; resuming from {saved[-1].name} instead" in output
    if unfinished:
        assert f"unfinished samples to continue: {unfinished}, from" in output
    assert not command_line.children("generator")
    assert not sockets.exists()
    assert not command_line.files_in_memory(), "a dead process's files are still in shared memory"

    command_line.phase("what was trained")
    kept = steps_of(saved[-1])
    steps = command_line.metrics()
    # Also a step that the trainer had saved and the killed controller had not recorded.
    assert [step.step for step in steps] == list(range(total))
    assert steps[: min(kept, len(before))] == before[:kept]
    assert {step.staleness.max for step in steps} == {0}
    assert worst_mismatch(steps) < 1e-3
    account = read_account(command_line.folder)
    assert account.is_exact
    assert account.trained == 4 * total
    assert not account.failed
    assert command_line.result().steps == total
    rates = [step.learning.learning_rate for step in steps]
    assert order.step > kept, "the run continues from before the order"
    assert rates[0] != 1e-5
    assert rates == [rates[0]] * order.step + [1e-5] * (total - order.step)
    samples = list(read_trained_samples(command_line.folder / "samples"))
    trained = Counter((one.step, one.group, one.sample) for one in samples)
    assert trained == Counter(
        (group // 4, group, sample) for group in range(4 * total) for sample in range(4)
    )
    every_answer_is_its_own(samples, command_line.model, world)
    every_session_has_ended_once(world, killed)


def traced(collector: Collector) -> dict[str, object]:
    """Settings of a run that this collector traces."""
    return {
        "monitoring__tracing__enabled": True,
        "monitoring__tracing__endpoint": collector.endpoint,
        "monitoring__tracing__sample_rate": 1.0,
    }


def steps_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def watched(command_line: CommandLine) -> list[str]:
    """The processes that Prometheus is told of."""
    listed = json.loads(targets_file(command_line.folder).read_text())
    return [one["labels"]["instance"] for one in listed]


def waiting_workers(world: World) -> set[int]:
    """The processes in which environments wait for the release, once there are two of them."""
    before = len(world.notes("held"))
    until(
        lambda: len({one["pid"] for one in world.notes("held")[before:]}) == 2,
        seconds=200,
        what="environments of both workers that wait",
    )
    return {one["pid"] for one in world.notes("held")[before:]}


def gone(pids: set[int], what: str) -> None:
    until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        seconds=120,
        what=f"{what} to end",
    )


def every_answer_is_its_own(samples: list[TrainedSample], model: Path, world: World) -> None:
    """Each sample has the answers to its own turns, of an environment that no other sample had."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = set(tokenizer.convert_tokens_to_ids([*STOPS, "<end>"]))
    prompts = {one["seed"]: one["prompt"] for one in world.notes("opened")}
    owners: dict[int, tuple[int, int]] = {}
    for sample in samples:
        tokens, turns, answers = sample.response_tokens or [], list[list[int]](), list[str]()
        while tokens:
            end = next((at + 1 for at, one in enumerate(tokens) if one in stops), len(tokens))
            turns.append(tokens[:end])
            answer, tokens = tokens[end : end + LENGTH], tokens[end + LENGTH :]
            answers.append("".join(tokenizer.convert_ids_to_tokens(answer)))
        assert sample.observed == sum(map(len, answers))
        answers = [one for one in answers if one]
        if not answers:
            continue
        asked = "".join(tokenizer.convert_ids_to_tokens(sample.prompt_tokens))
        (seed,) = (
            seed
            for seed, prompt in prompts.items()
            if prompt == asked
            and [answer_to(asked, seed, turns[: n + 1]) for n in range(len(answers))] == answers
        )
        assert owners.setdefault(seed, (sample.group, sample.sample)) == (
            sample.group,
            sample.sample,
        )
    assert len(owners) > len(samples) / 2, "otherwise this shows little"


def every_session_has_ended_once(world: World, killed: set[int]) -> None:
    """One after another: opened, asked, answered, ..., closed, unless its process was killed."""
    lives: dict[tuple[int, int], list[str]] = {}
    for one in world.notes():
        life = lives.setdefault((one["pid"], one["session"]), [])
        if one["what"] == "opened":
            life.clear()
        if one["what"] != "held":
            life.append(one["what"])
        whole = ["opened", *(TURNS * ["asked", "answered"])]
        last = len(life) - 1
        assert life == [*whole[:last], "closed" if life[-1] == "closed" else whole[last]]
    opened, closed = (
        Counter(one["pid"] for one in world.notes(what)) for what in ("opened", "closed")
    )
    assert {pid for pid in opened if opened[pid] != closed[pid]} <= killed
    assert len(set(opened) - killed) >= 2, "otherwise this shows little"
    gone(set(opened), "a worker")
