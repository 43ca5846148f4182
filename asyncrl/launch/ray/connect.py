"""Starts the broker and waits until the cluster has room. Every wait is bounded and named."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import UserError
from asyncrl.launch.ray import messages
from asyncrl.launch.ray.nodes import Slot

BROKER_MODULE = "asyncrl.launch.ray.broker"
CLOSE_SECONDS = 30.0
"""Longest wait for the broker's end; it bounds itself to less."""
_FIRST_SECONDS = 30.0
"""Longest time for the broker's imports."""
NODES_FILE = ".nodes"
"""In the run's folder."""
_POLL_SECONDS = 0.02
_UNAUTHENTICATED = "InvalidAuthToken"
"""Ray says so in its log and tries again, as long as it is let."""


@dataclass(slots=True)
class BrokerProcess:
    """The broker, as its controller sees it."""

    process: subprocess.Popen[bytes]
    input: BinaryIO
    received: queue.SimpleQueue[messages.FromBroker | None]
    """What it says; None when it has ended."""
    log: Path

    async def close(self) -> None:
        """Close its pipe, on which it ends the processes and itself; kill it if it does not.

        Ends within 2 * CLOSE_SECONDS. If it is cancelled, the broker is killed: Ray ends what a
        driver has left behind.
        """
        # By a thread: a broker that does not read lets this wait until it is killed.
        _in_thread(self.input.close)
        try:
            if not await self._ends_within(CLOSE_SECONDS):
                self.process.kill()
                await self._ends_within(CLOSE_SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()

    async def _ends_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return next((line for line in reversed(lines) if line.strip()), "(its log is empty)")


def check_ray() -> None:
    """Refuse to run without Ray. Raises UserError."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "launcher.kind: ray needs Ray, which is not installed: make setup EXTRAS=ray, or pip "
            "install 'asyncrl[ray]', on every node; or use launcher.kind: local"
        )


async def open_cluster(
    config: RunConfig, slots: tuple[Slot, ...], run_directory: Path, model_path: str
) -> tuple[BrokerProcess, messages.Opened]:
    """Start the broker and wait until there is room for every process.

    Raises:
        UserError: there is no such cluster, or it cannot carry the run. Nothing is left running.
    """
    check_ray()
    settings = config.launcher.ray
    runtime_env = dict(settings.runtime_env)
    if settings.image is not None:
        runtime_env["image_uri"] = settings.image
    # A node that can read the token shares the run's folder. It stays for the whole run: the node
    # of a replacement is asked as well.
    file, token = run_directory / NODES_FILE, secrets.token_hex(16)
    file.write_text(token, encoding="utf-8")
    question = {
        "token_file": str(file),
        "token": token,
        "model": model_path,
        "weights_directory": settings.weights_directory,
        "run_directory": str(run_directory),
        "bind_address": settings.bind_address or "",
    }
    asked = messages.Open(
        settings.address,
        slots,
        settings.strategy,
        json.dumps(runtime_env),
        json.dumps(question),
        settings.connect_seconds,
        settings.place_seconds,
    )
    broker = _start(run_directory / "logs" / "ray.log")
    try:
        _in_thread(partial(messages.write, broker.input, asked))
        return broker, await _opened(broker)
    except BaseException:
        broker.process.kill()  # Ray ends what a driver has left behind
        await broker.close()
        raise


def _in_thread(work: Callable[[], None]) -> None:
    """Do something with the pipe that may wait, at most until the broker has ended."""

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the pipe is closed
            work()

    threading.Thread(target=run, name="ray-broker-pipe", daemon=True).start()


def _start(log: Path) -> BrokerProcess:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", BROKER_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the controller
        )
    received: queue.SimpleQueue[messages.FromBroker | None] = queue.SimpleQueue()
    ends = cast("tuple[BinaryIO, BinaryIO]", (process.stdin, process.stdout))

    def read() -> None:
        with ends[1]:
            for message in messages.read_all(ends[1], messages.FROM_BROKER):
                received.put(message)
        received.put(None)

    threading.Thread(target=read, name="ray-broker", daemon=True).start()
    return BrokerProcess(process, ends[0], received, log)


async def _opened(broker: BrokerProcess) -> messages.Opened:
    """Wait for the broker, stage by stage."""
    what, until = "Ray to be imported", time.monotonic() + _FIRST_SECONDS
    while True:
        try:
            message = broker.received.get_nowait()
        except queue.Empty:
            if time.monotonic() < until:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            if _UNAUTHENTICATED in broker.last_words():
                raise UserError(
                    "the Ray head asks for a token, and there is none here or another one: set "
                    "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) for asyncrl "
                    "run, as for `ray start` on every node"
                ) from None
            raise UserError(
                f"waited for {what}, and it did not come in time. A head that is dead or behind a "
                "firewall does not refuse a connection, it is silent: look at it with `ray status "
                "--address=HOST:PORT` from this machine"
            ) from None
        match message:
            case messages.Stage(what=what, seconds=seconds):
                until = time.monotonic() + seconds
            case messages.Opened():
                return message
            case messages.Refused(reason=reason):
                raise UserError(reason)
            case None:
                raise UserError(
                    f"waited for {what}, but the process that speaks to Ray ended; its last words: "
                    f"{broker.last_words()}"
                )
