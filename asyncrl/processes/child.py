"""What every child process of a run does first and last.

A child is started as `python -m asyncrl.processes.child ROLE RUNTIME_JSON`. It never outlives the
process that started it, leaves Ctrl-C to it, logs to its own file (its standard error, opened by
the launcher) and says why it fails before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import zmq.asyncio

from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import AsyncrlError
from engine.errors import EngineError
from monitoring.errors import MonitoringError
from trainer.errors import TrainerError
from wire.errors import WireError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, and files of mode 0600
"""Where the trainer publishes weights, and generators exchange rollouts."""

ENDING_SECONDS = 10
"""Longest time that a child told to end may take to clean up."""

_PR_SET_PDEATHSIG = 1


def weights_id(run_name: str, parent: int) -> str:
    """Names the weight files of the run that this process started."""
    return f"{run_name}-{parent}"


def exchange_directory(run_name: str, parent: int) -> Path:
    """Where generators of the run that this process started exchange rollouts."""
    return SHARED_MEMORY / f"asyncrl-{weights_id(run_name, parent)}-exchange"


def remove_left_memory() -> None:
    """Remove what killed processes left in memory: of this process's run, or of a dead one's."""
    for path in SHARED_MEMORY.glob("asyncrl-*"):
        match = re.fullmatch(r"asyncrl-.+-(\d+)-(weights-\d|exchange)", path.name)
        if match is None:
            continue
        owner = int(match[1])
        if owner == os.getpid() or not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):  # another user's
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class ChildSpec(msgspec.Struct, frozen=True):
    """What a child is told when it starts, as JSON on its command line."""

    role: str
    """"generator" or "trainer"."""
    name: str
    run_directory: str
    model_path: str
    control_address: str
    data_address: str
    parent: int
    """Process id of the launcher."""
    threads: int
    """Threads for tensor work."""
    process_index: int = 1
    """Which process of the run this is; the controller is 0. Its metrics port hangs on it."""
    stop_tokens: tuple[int, ...] = ()
    resume: bool = False
    first: bool = True
    """Not a replacement of one that died."""

    def config(self) -> RunConfig:
        """The run's resolved configuration, from the run's folder."""
        import yaml

        path = Path(self.run_directory) / "config.yaml"
        return parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), source=str(path))


def live_and_die_with(parent: int) -> None:
    """Ask the kernel to end this process with its parent; end at once if it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


def leaf_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error inside a group: what a task of a TaskGroup died of."""
    first = group.exceptions[0]
    return leaf_of(first) if isinstance(first, BaseExceptionGroup) else first


def _end_what_was_started() -> None:
    """The child leads a process group of its own; nothing in it may outlive it."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def _end_by_signal(number: int, _frame: object) -> None:
    """End in order, but end: after ENDING_SECONDS the kernel does it."""
    signal.alarm(ENDING_SECONDS)
    sys.exit(128 + number)


def main() -> None:
    """Entry point of every child process."""
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    live_and_die_with(spec.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_by_signal)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    import torch

    torch.set_num_threads(spec.threads)
    logger = logging.getLogger(f"asyncrl.{spec.name}")
    try:
        if spec.role == "generator":
            from asyncrl.processes.generator_setup import run_generator

            asyncio.run(run_generator(spec))
        else:
            from asyncrl.processes.trainer import run_trainer

            asyncio.run(run_trainer(spec))
    except AsyncrlError as error:
        logger.error("%s", error)
        sys.exit(error.exit_code)
    except (EngineError, TrainerError, MonitoringError, WireError) as error:
        logger.error("%s", error)
        sys.exit(1)
    except BaseExceptionGroup as group:
        logger.exception("a loop of this process broke", exc_info=group)
        sys.exit(1)
    finally:
        # Let the last messages out: they say why this process ends.
        zmq.asyncio.Context.instance().destroy(linger=1000)
        _end_what_was_started()


if __name__ == "__main__":
    main()
