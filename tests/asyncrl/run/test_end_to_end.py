"""Whole runs through the command line: real processes, real sockets, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asyncrl_runs import (
    ROOT,
    UNHURRIED,
    CommandLine,
    Terminal,
    call,
    call_here,
    until,
    worst_mismatch,
)
from hostile_frames import attack_without_a_key
from needed_programs import path_of
from served_sglang import sglang_python
from suite_outcome import not_run
from tiny_warm_start import place_untrained
from watched_page import (
    RunPage,
    is_steered,
    is_watched,
    survives_kills_of_its_page,
    the_page_has_ended,
)
from watching_prometheus import Prometheus, watching

from asyncrl.config.run_config import load_config
from asyncrl.launch.identity import status_of
from asyncrl.monitoring.dashboards.panels import ROWS
from asyncrl.monitoring.metrics.discovery import targets_file
from asyncrl.monitoring.records.group_account import read_account
from asyncrl.monitoring.records.metrics_log import read_evaluations
from asyncrl.monitoring.records.trained_samples import TrainedSample, read_trained_samples
from asyncrl.runs.directory import RunDirectory, read_state
from asyncrl.tasks.builtin.warm_start_recipe import AGENT_RECIPE

pytestmark = pytest.mark.slow


@pytest.fixture
def prometheus(
    command_line: CommandLine, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Prometheus | None]:
    """Watches the runs of `command_line`; None where Prometheus is not installed."""
    if not is_there("prometheus", request):
        yield None
        return
    command_line.runs.mkdir()
    with watching(command_line.runs, tmp_path / "prometheus") as started:
        yield started


def is_there(program: str, request: pytest.FixtureRequest) -> bool:
    """Whether a part of a test can run; if it cannot, it is counted as not run."""
    if path_of(program) is not None:
        return True
    not_run(request.node, f"{program} is not installed (Debian: apt-get install {program})")
    return False


@pytest.mark.usefixtures("_forked_runs")
def test_two_ranks_one_of_which_is_killed_train_each_group_once_and_ctrl_c_twice_ends_them(
    command_line: CommandLine, tmp_path: Path
) -> None:
    """Ctrl-C ends it also when a trainer does not answer; it leaves nothing but a run to resume.

    The algorithm is the example of the page. Responses end at their stop string.
    """
    algorithm = tmp_path / "my_algorithm.py"
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    algorithm.write_text(example)
    command_line.phase("two ranks train")
    terminal = command_line.start_in_terminal(
        run__steps=500, trainer__ranks=2, trainer__checkpoint_every=2, run__log_samples="jsonl",
        trainer__algorithm=f"{algorithm}:AboveMean",
        sampling__stop='["e"]', sampling__top_k=20,
    )  # fmt: skip
    command_line.wait_for_steps(3)
    assert "AboveMean: your own algorithm" in terminal.text
    command_line.phase("a rank is killed")
    (last,) = [pid for pid in command_line.children("trainer") if _rank(pid) == 1]
    os.kill(last, signal.SIGKILL)
    before = command_line.steps()
    command_line.wait_for_steps(before + 3)
    assert "trainer-1 was killed by SIGKILL" in terminal.text
    said = "started trainer.1 and trainer-1.1 in place of trainer and trainer-1, from"
    assert said in terminal.text
    command_line.phase("Ctrl-C is pressed twice while a rank does not answer")
    trained, folder = command_line.steps(), command_line.folder / "samples"

    def samples() -> list[TrainedSample]:
        """The trainer is a step ahead of the controller's records, and its files behind both."""
        return [one for one in read_trained_samples(folder) if one.step < trained]

    until(lambda: len(samples()) == 16 * trained, seconds=60, what="all samples of these steps")
    state = json.loads((command_line.folder / "run.json").read_text())
    (first,) = [pid for pid in command_line.children("trainer") if _rank(pid) == 0]
    os.kill(first, signal.SIGSTOP)
    terminal.press_ctrl_c()
    until(lambda: "press Ctrl-C again" in terminal.text, seconds=60, what="the first answer")
    terminal.press_ctrl_c()
    assert terminal.process.wait(timeout=60) == 130, terminal.text[-2000:]
    _ended_at_once(command_line, terminal, Path(state["control_address"].removeprefix("ipc://")))

    command_line.phase("what was trained")
    steps = command_line.metrics()
    assert [step.step for step in steps] == list(range(len(steps)))
    assert {step.staleness.max for step in steps} == {0}
    assert worst_mismatch(steps) < 1e-3
    assert {step.algorithm["clip_ratio"] for step in steps} == {0}
    account = read_account(command_line.folder)
    assert account.is_exact
    assert account.trained == 4 * len(steps)
    logged = sorted((one.step, one.group) for one in samples())
    assert logged == [(at // 4, at) for at in range(4 * trained) for _ in range(4)]
    texts = [file.read_text() for file in folder.glob("*-rank-1.jsonl")]
    of_second = "".join(texts).splitlines()
    assert 0 < len(of_second) < len(samples()), "both ranks had groups"
    ended = [one for one in samples() if "e" in one.response]
    assert ended, "no response has the stop string"
    assert all(one.response.index("e") == len(one.response) - 1 for one in ended)
    assert {one.finish_reason for one in ended} == {"stop"}


def _ended_at_once(command_line: CommandLine, terminal: Terminal, control_socket: Path) -> None:
    """By force: it says so, nothing is left behind, and it can be resumed."""
    assert "ended at once by a second signal" in terminal.text
    assert not command_line.children("generator") + command_line.children("trainer")
    assert not control_socket.parent.exists()
    left = Path("/dev/shm").glob(f"asyncrl-{command_line.name}-{terminal.process.pid}-*")  # noqa: S108
    assert not list(left)
    assert not targets_file(command_line.folder).exists()
    ended = read_state(command_line.folder)
    assert ended is not None
    assert ended.ended == "stopped"
    config = load_config(command_line.folder / "config.yaml")
    RunDirectory.create(config, resume=True, clean=False).close()
    assert list((command_line.folder / "checkpoints").glob("step-*"))


def _rank(pid: int) -> int:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    (spec,) = (one for one in arguments if one.startswith(b"{"))
    rank: int = json.loads(spec)["rank"]
    return rank


@pytest.mark.usefixtures("_forked_runs")
def test_a_run_is_suspended_attacked_watched_and_steered_stopped_and_resumed_in_a_terminal(
    command_line: CommandLine, prometheus: Prometheus | None, request: pytest.FixtureRequest
) -> None:
    """In a terminal then, whose window is closed: that ends the run in order, too.

    A real Prometheus watches, and a browser if there is one. After the resume weights are
    broadcast.
    """
    process = command_line.start(
        run__steps=100_000, rewards__functions=UNHURRIED, monitoring__live="plain"
    )
    command_line.wait_for_steps(3)
    page = RunPage(command_line)
    assert page.processes() == [], "nobody has looked yet"
    asyncrl = [sys.executable, "-m", "asyncrl"]
    command_line.phase("its processes are suspended and continue")
    for suspended in (*command_line.children("generator"), *command_line.children("trainer")):
        suspend_and_continue(suspended)
    suspend_and_continue(process.pid)
    command_line.phase("its status is asked for")
    status = call_here([*asyncrl, "status", str(command_line.folder), "--json"])
    assert status.returncode == 0, status.stdout
    shown: dict[str, Any] = json.loads(status.stdout)
    assert shown["phase"] == "training"
    assert set(shown["processes"]) == {"trainer", "generator-0"}
    for about in shown["processes"].values():
        url = f"http://127.0.0.1:{about['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=60) as reply:
            assert "asyncrl_policy_version" in reply.read().decode()
    command_line.phase("it is attacked without a key")
    state = read_state(command_line.folder)
    assert state is not None
    if prometheus is not None:  # an increase is seen only by those who saw the number before it
        refused = 'asyncrl_frames_refused_total{reason="unauthenticated", process="trainer"}'
        until(lambda: prometheus.has_data(refused), seconds=120, what="a first look at the trainer")
    attack_without_a_key(Path(state.control_address.removeprefix("ipc://")).parent)
    port = shown["processes"]["trainer"]["metrics_port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        counted = re.search(r'reason="unauthenticated"} ([\d.]+)', reply.read().decode())
    assert counted is not None
    assert float(counted[1]) > 0, "the attack was not noticed"
    if prometheus is not None:
        command_line.phase("Prometheus watches, and is killed")
        every_panel_has_data(prometheus)
        only_the_attack_raises_an_alert(prometheus)
        prometheus.kill()
        trained = command_line.steps()
        command_line.wait_for_steps(trained + 2)
    in_use = call_here(command_line.arguments())
    assert in_use.returncode == 2
    assert "is active" in " ".join(in_use.stdout.split())
    is_watched(page)
    if is_there("chromium", request):
        is_steered(page)
    survives_kills_of_its_page(page)
    command_line.phase("it is stopped")
    stopped = call_here([*asyncrl, "stop", str(command_line.folder)])
    assert stopped.returncode == 0, stopped.stdout
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    the_page_has_ended(page, output)
    assert not targets_file(command_line.folder).exists()
    assert "continue with: asyncrl run" in output
    assert "--resume" in output
    steps = command_line.steps()
    assert (command_line.folder / "checkpoints" / f"step-{steps:06d}").is_dir()
    command_line.phase("it is resumed in a terminal, whose window is closed")
    terminal = command_line.start_in_terminal(
        "--resume", run__steps=200_000, rewards__functions=UNHURRIED,
        launcher__weights="broadcast", launcher__trusted_network=True,
    )  # fmt: skip
    command_line.wait_for_steps(steps + 2)
    terminal.close()
    terminal.process.wait(timeout=200)
    assert json.loads((command_line.folder / "run.json").read_text())["ended"] == "stopped"
    ended = command_line.steps()
    assert (command_line.folder / "checkpoints" / f"step-{ended:06d}").is_dir()
    assert [step.step for step in command_line.metrics()] == list(range(ended))
    assert max(step.learning.reward_mean for step in command_line.metrics()) <= 1.0
    log = (command_line.folder / "logs" / "generator-0.log").read_text()
    assert "tokens of an earlier process" in log
    log = (command_line.folder / "logs" / "trainer.log").read_text()
    assert len(re.findall(r"broadcast to 1 engine processes in [\d.]+ s: whole", log)) >= 2


def every_panel_has_data(prometheus: Prometheus) -> None:
    queries = {
        f"{panel.title}: {query.expr}": query.expr
        for _, panels in ROWS
        for panel in panels
        for query in panel.queries
        if "asyncrl_environment_seconds" not in query.expr  # this run has no environment
    }

    def is_complete() -> bool:
        for name in [name for name, expr in queries.items() if prometheus.has_data(expr)]:
            del queries[name]
        return not queries

    with contextlib.suppress(pytest.fail.Exception):
        until(is_complete, seconds=120, what="data in every panel")
    assert not queries, "panels without data"


def only_the_attack_raises_an_alert(prometheus: Prometheus) -> None:
    until(prometheus.firing, seconds=120, what="an alert")
    assert prometheus.firing() == {"AsyncrlStrangersRefused"}
    assert prometheus.unhealthy_rules() == []


def suspend_and_continue(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(
        lambda: (status := status_of(pid)) is not None and status.is_stopped,
        seconds=60,
        what="a process to be suspended",
    )
    os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("_forked_runs")
def test_a_program_with_the_openai_client_trains_as_the_page_starts_it(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example is short, and else as it is. Its model is untrained: all its rewards may be 0."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place_untrained(tmp_path, AGENT_RECIPE)
    command_line.name = "agent-openai"
    short = ["run.steps=2", "evaluation.prompts=16", f"run.directory={command_line.runs}"]
    pairs = [f"--set={one}" for one in (*short, "trainer.skip_zero_variance_groups=false")]
    command = [sys.executable, "-m", "asyncrl", "run", "examples/agent_openai.yaml", *pairs]
    done = call(command, timeout=900)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    steps = command_line.metrics()
    assert [step.step for step in steps] == [0, 1]
    assert all(step.batch.tokens > 0 for step in steps)
    assert worst_mismatch(steps[:1]) < 1e-3, "the program's turns are not those that are trained"


@pytest.mark.usefixtures("_forked_runs")
@pytest.mark.vllm
@pytest.mark.sglang
def test_on_vllm_and_sglang_what_is_generated_ahead_is_verified_and_exact(
    command_line: CommandLine, tmp_path: Path
) -> None:
    """Each has a quarter of a step's samples in its few slots at a time; the model is tied.

    Both also have held-out samples of steps 2 and 4 while they train.
    """
    command_line.phase("it trains on both engines")
    process = command_line.start(
        engine__kinds="[vllm, sglang]", engine__sglang__python=sglang_python(),
        launcher__generators=2, run__steps=5, model__path=tied(command_line.model, tmp_path),
        engine__slots=4, trainer__learning_rate=3e-3, sampling__max_tokens=40,
        scheduler__on_update="verify", scheduler__max_off_policy_steps=0,
        evaluation__every=2, evaluation__samples=4, evaluation__hold_seconds=1000,
    )  # fmt: skip
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    command_line.phase("what was evaluated and trained")
    every_evaluation_has_a_result_or_a_reason(command_line, output)
    result = command_line.result()
    assert (result.engine, result.steps) == ("vllm+sglang", 5)
    assert result.exactly_on_policy
    steps = command_line.metrics()
    assert [step.staleness.max for step in steps] == [0] * 5
    assert worst_mismatch(steps) < 1e-3, "it does not follow the trainer's policy"
    assert steps[-1].tokens.verified > 0, "nothing was generated ahead"
    assert steps[-1].tokens.rejected > 0, "the policy hardly moved, so nothing was rejected"
    for name in ("generator-0", "generator-1"):
        *_, last = (command_line.folder / "engine" / f"{name}.jsonl").read_bytes().splitlines()
        engine = json.loads(last)["engine"]
        assert engine["tokens"]["generated"] > 0, name
        assert engine["policy_version"] >= 4, "the line may be of before the last installation"
        assert "Traceback" not in (command_line.folder / "logs" / f"{name}.log").read_text()


def every_evaluation_has_a_result_or_a_reason(command_line: CommandLine, output: str) -> None:
    """Of two generators one may fall behind: a round is given up then, or another not begun."""
    said = " ".join(output.split())
    without = re.findall(r"evaluation of step (\d+) (?:is given up|has no result)", said)
    records = read_evaluations(command_line.folder / "evaluations.jsonl")
    during = [one for one in records if one.when == "during"]
    told = [*map(int, without), *(one.step for one in during)]
    assert 2 in told, said
    assert set(told) <= {2, 4}
    assert len(told) == len(set(told)), said
    assert {one.sets["held_out"].samples for one in during} <= {16}
    assert "which is a defect" not in said


def tied(like: Path, folder: Path) -> Path:
    """A random model of the same shape, whose output layer is its embedding.

    Next to its weights there are others, which vLLM would take instead and SGLang too.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(like, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    assert len(list(model.parameters())) < len(model.state_dict())
    model.save_pretrained(folder / "tied")
    others = {name: -tensor.detach() for name, tensor in model.named_parameters()}
    save_file(others, folder / "tied" / "consolidated.safetensors")
    AutoTokenizer.from_pretrained(like).save_pretrained(folder / "tied")
    return folder / "tied"
