"""Entry point of every child process: `python -m asyncrl.child SPEC_JSON`.

Its keys come on standard input (`ChildKeys`), which is then closed. A child ends when the process
that started it ends, ignores Ctrl-C (the controller handles it) and logs to its standard error,
which the launcher redirects to a file.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq.asyncio

from asyncrl.engine.errors import EngineError
from asyncrl.errors import AsyncrlError
from asyncrl.launch import child_spec
from asyncrl.launch.start_order import configure_allocator
from asyncrl.monitoring.errors import MonitoringError
from asyncrl.secret_files import take_permissions_of
from asyncrl.trainer.base.errors import TrainerError
from asyncrl.user_code.process_tree import end_process, end_with_parent
from asyncrl.wire.errors import WireError

SHUTDOWN_SECONDS = 10
"""Longest time that a child may take to clean up after SIGTERM."""


def _exit_on_signal(number: int, _frame: object) -> None:
    """Exit with clean-up; if that takes over SHUTDOWN_SECONDS, SIGALRM ends the process."""
    signal.alarm(SHUTDOWN_SECONDS)
    sys.exit(128 + number)


def _run(spec: child_spec.ChildSpec, keys: bytes) -> None:
    """Run the process of this role. A relay does not import torch, so it starts quickly."""
    if isinstance(spec, child_spec.RelaySpec):
        from asyncrl.relay.setup import run_relay

        asyncio.run(run_relay(spec, msgspec.msgpack.decode(keys, type=child_spec.RelayKeys)))
        return
    if isinstance(spec, child_spec.TrainerSpec):
        configure_allocator(os.environ)
    gc.disable()  # until `without_collecting_the_start`: imports leave no garbage
    import torch

    torch.set_num_threads(spec.threads)
    decode = msgspec.msgpack.decode
    if isinstance(spec, child_spec.GeneratorSpec):
        from asyncrl.generator.setup import run_generator

        asyncio.run(run_generator(spec, decode(keys, type=child_spec.GeneratorKeys)))
    else:
        from asyncrl.trainer_process.setup import run_trainer

        asyncio.run(run_trainer(spec, decode(keys, type=child_spec.TrainerKeys)))


def main() -> None:
    """Run the process that the command line describes; exit with 1 or 2 if it fails."""
    spec = child_spec.read_spec(sys.argv[1], os.environ)
    end_with_parent(spec.parent, signal.SIGTERM)
    keys = sys.stdin.buffer.read()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logger = logging.getLogger(f"asyncrl.{spec.name}")
    with contextlib.suppress(OSError):  # on another machine its agent's umask may be open
        take_permissions_of(Path(spec.run_directory))
    try:
        _run(spec, keys)
    except (AsyncrlError, EngineError, TrainerError, MonitoringError, WireError) as error:
        logger.error("%s", error)
        sys.exit(getattr(error, "exit_code", 1))
    except BaseExceptionGroup as group:
        logger.exception("a loop of this process failed", exc_info=group)
        sys.exit(1)
    finally:
        # Send the last messages, with the reason of this process's end.
        zmq.asyncio.Context.instance().destroy(linger=1000)
        if os.getpgrp() == os.getpid():  # processes of the group that it leads must not outlive it
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, int):
            end_process(ended.code)
        raise
    end_process(0)
