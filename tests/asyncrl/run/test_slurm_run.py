"""The job of Slurm's example, with an `srun` that starts its tasks on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path

import pytest
from asyncrl_runs import CommandLine, until, worst_mismatch
from forked_runs import shell_command

from asyncrl.monitoring.records.group_account import read_account
from benchmarks.chaos.agents_run import free_ports

ROOT = Path(__file__).resolve().parents[3]
JOB = ROOT / "examples/slurm/run.sbatch"
SRUN = """#!/bin/bash
[[ $1 = --ntasks=$SLURM_NTASKS ]] || exit 9
shift
for ((task = 0; task < SLURM_NTASKS; task++)); do SLURM_PROCID=$task "$@" & done
wait
"""
PATIENCE = 300
"""Seconds; nothing is decided by time on a machine that others use too."""


def test_a_shell_can_read_the_job() -> None:
    done = subprocess.run(["bash", "-n", JOB], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


@pytest.mark.slow
def test_a_job_trains_ends_before_its_limit_and_continues(
    command_line: CommandLine, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    programs = {
        "srun": SRUN,
        "asyncrl": shell_command(),
        "hostname": "#!/bin/bash\necho 127.0.0.1\n",
    }
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    command_line.name = f"slurm-{secrets.token_hex(3)}"
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "3",
        "PORT": str(free_ports(2)),
    }

    def submit(**settings: object) -> subprocess.Popen[str]:
        words = command_line.arguments(**settings)  # PYTHON -m asyncrl run CONFIG --set ...
        job = subprocess.Popen(
            ["bash", str(JOB), *words[4:]],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        command_line.started.append(job)
        return job

    def ended(job: subprocess.Popen[str]) -> None:
        said = job.communicate(timeout=PATIENCE)[0]
        assert job.returncode == 0, said

    metrics = command_line.folder / "metrics.jsonl"
    job = submit(run__steps=1_000_000)
    try:
        until(lambda: metrics.exists(), seconds=PATIENCE, what="training", run=job)
        command_line.wait_for_steps(2)
        assert len(command_line.children("generator")) == 2
        assert (tmp_path / ".asyncrl-7.key").stat().st_mode & 0o777 == 0o600
    finally:
        job.send_signal(signal.SIGTERM)  # as `--signal=B:TERM@300`
        ended(job)
    steps = command_line.steps()
    ended(submit(run__steps=steps + 2))
    assert not (tmp_path / ".asyncrl-7.key").exists()
    records = command_line.metrics()
    assert [one.step for one in records] == list(range(steps + 2))
    assert read_account(command_line.folder).is_exact
    assert worst_mismatch(records) < 1e-3
    roles = ("trainer", "generator", "relay")
    until(
        lambda: not any(command_line.children(role) for role in roles),
        seconds=PATIENCE,
        what="the end of all processes",
    )
