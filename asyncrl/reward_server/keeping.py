"""The reward servers of a run: one process for each `reward_model` with `args.model`.

    controller ── socket, process ──► reward server ◄── requests ── reward workers of all generators

A run has one copy of each model, whatever the number of generators and workers. The controller
keeps the listening socket. So the address stays when the process ends and another one is started,
and connections wait meanwhile. Generators read the addresses from RUN/reward-servers.json. The
kernel kills a server with the controller.

Where a reward server listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UserError
from asyncrl.monitoring.config import is_loopback
from asyncrl.reward_server.classifier import ClassifierSettings
from asyncrl.rewards import reward_model
from asyncrl.rewards.addresses import with_urls, write_addresses
from asyncrl.rewards.config import RewardConfig

_BACKLOG = 1024


def listen(host: str, port: int, *, has_token: bool) -> socket.socket:
    """Open the socket.

    Raises:
        UserError: the address cannot be used, or others could reach it without a token.
    """
    if not has_token and not is_loopback(host):
        raise UserError(
            f"--host {host}: others could reach the server, so it needs a token: name an "
            "environment variable that holds one with --token-env, or a file with --token-file "
            "(and the same in the reward's args: token_env, token_file)"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(
            f"--host {host} --port {port}: the reward server cannot listen there "
            f"({error.strerror or error}); choose a free port (0: any) of an address of this "
            "machine"
        ) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """The address of a socket, as args.url takes it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_CHECK_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
"""Before a server that ended is started again; twice as long each time, up to the next."""
_LONGEST_PAUSE = 60.0
_LONG_SECONDS = 600.0
"""A server that lived for so long did not end soon, and the pauses begin again."""
_END_SECONDS = 5.0


@dataclass(slots=True)
class _Server:
    index: int
    """Of its function in `rewards.functions`."""
    settings: ClassifierSettings
    listening: socket.socket
    process: subprocess.Popen[bytes]
    ready: int
    """Descriptor on which the process says that it answers; -1: closed."""
    began: float
    """Monotonic seconds."""
    starts: int = 1

    @property
    def name(self) -> str:
        return f"reward-server-{self.index}"


@dataclass(slots=True, eq=False)
class RewardServers:
    """The servers of one run."""

    logs: Path
    """Folder of their logs."""
    say: Callable[[str], None]
    _servers: list[_Server] = field(default_factory=list)
    _watching: asyncio.Task[None] | None = None

    @property
    def urls(self) -> dict[int, str]:
        """By the index of the function."""
        return {server.index: url_of(server.listening) for server in self._servers}

    async def start(self, config: RewardConfig) -> None:
        """Start the servers and wait until they answer.

        Raises:
            UserError: one does not, within `rewards.startup_seconds`.
        """
        for index, function in enumerate(config.functions):
            if function.name == reward_model.NAME and "model" in function.args:
                self._add(index, _settings(function.args))
        for server in self._servers:
            await self._until_ready(server, config.startup_seconds)
        if self._servers:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the servers. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        servers, self._servers = self._servers, []
        for server in servers:
            server.process.terminate()
        for server in servers:
            try:
                await asyncio.to_thread(server.process.wait, _END_SECONDS)
            except subprocess.TimeoutExpired:
                server.process.kill()
                await asyncio.to_thread(server.process.wait)
            _close_ready(server)
            server.listening.close()

    def _add(self, index: int, settings: ClassifierSettings) -> None:
        listening = listen("127.0.0.1", 0, has_token=False)
        process, ready = self._spawn(index, settings, listening)
        self._servers.append(_Server(index, settings, listening, process, ready, time.monotonic()))

    def _spawn(
        self, index: int, settings: ClassifierSettings, listening: socket.socket
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start a process; it and the descriptor on which it says that it is ready."""
        name = f"reward-server-{index}"
        reading, writing = os.pipe()
        try:
            with (self.logs / f"{name}.log").open("ab") as output:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "asyncrl.reward_server.process"),
                        msgspec.json.encode(settings).decode(),
                        *("--socket", str(listening.fileno()), "--ready", str(writing)),
                        *("--parent", str(os.getpid())),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(listening.fileno(), writing),
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return process, reading

    async def _until_ready(self, server: _Server, seconds: float) -> None:
        said = await asyncio.to_thread(_read, server.ready, seconds)
        if said == b"ready":
            return
        last = _last_line(self.logs / f"{server.name}.log")
        how = (
            f"was not ready within {seconds:g} s (rewards.startup_seconds)"
            if said is None
            else "ended as it was started"
        )
        raise UserError(
            f"the server of rewards.functions[{server.index}] with {server.settings.model} {how}"
            f"{': ' + last if last else ''}"
        )

    async def _watch(self) -> None:
        """Start servers again that have ended."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            for server in self._servers:
                code = server.process.poll()
                if code is not None:
                    try:
                        await self._start_again(server, code)
                    except OSError as error:  # no memory, processes or descriptors; tried again
                        self.say(f"WARNING: a reward server could not be started: {error}")

    async def _start_again(self, server: _Server, code: int) -> None:
        if time.monotonic() - server.began > _LONG_SECONDS:
            server.starts = 1
        pause = min(_LONGEST_PAUSE, _PAUSE_SECONDS * 2.0 ** min(server.starts - 1, 16))
        last = _last_line(self.logs / f"{server.name}.log")
        self.say(
            f"WARNING: the reward server with {server.settings.model} ended with exit code {code}"
            f"{': ' + last if last else ''}; it is started again in {pause:g} s. Rewards wait "
            f"for it, up to rewards.timeout_seconds each"
        )
        await asyncio.sleep(pause)
        _close_ready(server)
        server.starts += 1
        server.began = time.monotonic()
        server.process, server.ready = self._spawn(server.index, server.settings, server.listening)


def _close_ready(server: _Server) -> None:
    if server.ready >= 0:
        os.close(server.ready)
        server.ready = -1


def _settings(args: Mapping[str, Any]) -> ClassifierSettings:
    given = {key: args[key] for key in reward_model.SERVER_ARGS if key in args}
    return ClassifierSettings(**given, device="cpu")


def _read(descriptor: int, seconds: float) -> bytes | None:
    """What a process says; empty: it has ended; None: nothing in time."""
    if not select.select([descriptor], [], [], seconds)[0]:
        return None
    return os.read(descriptor, 16)


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - (1 << 14)))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:400]


async def open_reward_servers(
    config: RewardConfig,
    run: Path,
    say: Callable[[str], None],
    closing: contextlib.AsyncExitStack,
) -> None:
    """Start the reward servers of a run, if it has any; `closing` ends them.

    Raises:
        UserError: one cannot serve its model.
    """
    servers = RewardServers(run / "logs", say)
    closing.push_async_callback(servers.close)
    await servers.start(config)
    if servers.urls:
        write_addresses(run, servers.urls)
        for index, url in servers.urls.items():
            model = config.functions[index].args["model"]
            say(f"reward model {model} is served at {url}, on the CPU")


@contextlib.asynccontextmanager
async def served(
    config: RewardConfig, logs: Path, say: Callable[[str], None]
) -> AsyncIterator[RewardConfig]:
    """The configuration with the addresses of servers that run until the end.

    Raises:
        UserError: a server cannot serve its model.
    """
    servers = RewardServers(logs, say)
    try:
        await servers.start(config)
        yield with_urls(config, servers.urls)
    finally:
        await servers.close()
