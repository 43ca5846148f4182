"""The reward servers of a run: one process for each `reward_model` with `args.model`.

    controller ── socket, process ──► reward server ◄── requests ── reward workers of all generators

The controller keeps the listening socket, so a restarted server has the same address, and
connections wait for it. Generators read the addresses from RUN/reward-servers.json. The kernel
kills a server with the controller.
"""

import asyncio
import contextlib
import os
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
from asyncrl.rewards import reward_model
from asyncrl.rewards.config import RewardConfig
from asyncrl.wire.transport.atomic_files import write_atomically

_FILE = "reward-servers.json"
_BACKLOG = 1024
_CHECK_SECONDS = 0.5
_PAUSE_SECONDS = 1.0
"""First pause before a restart; it doubles each time, up to `_LONGEST_PAUSE`."""
_LONGEST_PAUSE = 60.0
_LONG_SECONDS = 600.0
"""Lifetime of a server after which the pauses begin again with the first."""
_END_SECONDS = 5.0


def starts_servers(config: RewardConfig) -> bool:
    """Return True if a run with these rewards starts reward servers."""
    return bool(_served_here(config))


def _served_here(config: RewardConfig) -> dict[int, dict[str, Any]]:
    """Return the arguments of each function that needs a server, by the function's index."""
    return {
        index: one.args
        for index, one in enumerate(config.functions)
        if one.name == reward_model.NAME and "model" in one.args
    }


@dataclass(slots=True, eq=False)
class _Server:
    """The server of one model, whose process restarts after its end."""

    args: Mapping[str, Any]
    log: Path
    say: Callable[[str], None]
    listening: socket.socket = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.process = _spawn(self.args, self.listening, self.log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening.getsockname()[1]}"

    async def until_ready(self, index: int, args: dict[str, Any], seconds: float) -> None:
        """Wait until it has scored a trial text for function number `index`. Raises UserError."""
        args = args | {"attempt_seconds": None}  # the model is loaded first
        trial = asyncio.create_task(reward_model.try_once(args, seconds))
        while not trial.done() and self.process.poll() is None:
            await asyncio.wait([trial], timeout=_CHECK_SECONDS)
        ended = not trial.done()
        if ended:
            trial.cancel()
            await asyncio.wait([trial])
        reason = _last_line(self.log) if ended else trial.result()
        if ended or reason is not None:
            how = "ended while it started"
            if not ended:
                how = f"did not score a trial text within {seconds:g} s (rewards.startup_seconds)"
            raise UserError(
                f"the server of rewards.functions[{index}] with {self.args['model']} {how}: "
                f"{reason}"
            )

    async def keep(self) -> None:
        """Restart the process whenever it has ended."""
        pause = _PAUSE_SECONDS
        while True:
            began = time.monotonic()
            while (code := self.process.poll()) is None:  # noqa: ASYNC110 - a process ends
                await asyncio.sleep(_CHECK_SECONDS)
            if time.monotonic() - began > _LONG_SECONDS:
                pause = _PAUSE_SECONDS
            last = _last_line(self.log)
            self.say(
                f"WARNING: the reward server with {self.args['model']} ended with exit code {code}"
                f"{': ' + last if last else ''}; it restarts in {pause:g} s. Rewards wait for it, "
                "up to rewards.timeout_seconds each"
            )
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
            try:
                self.process = _spawn(self.args, self.listening, self.log)
            except OSError as error:  # no memory, processes or descriptors
                self.say(f"WARNING: a reward server could not be started: {error}")

    async def close(self) -> None:
        """End the process, which has been asked to terminate."""
        try:
            await asyncio.to_thread(self.process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        self.listening.close()


def _spawn(args: Mapping[str, Any], listening: socket.socket, log: Path) -> subprocess.Popen[bytes]:
    given = {"--max-tokens": args.get("max_tokens"), "--threads": args.get("threads")}
    command = [
        *(sys.executable, "-P", "-m", "asyncrl.reward_server.server", str(args["model"])),
        *("--socket", str(listening.fileno()), "--parent", str(os.getpid())),
        *(text for key, value in given.items() if value for text in (key, str(value))),
    ]
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(listening.fileno(),),
        )


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:400]


def with_servers(config: RewardConfig, run: Path) -> RewardConfig:
    """Return the configuration with the addresses that the run's controller has written."""
    if not starts_servers(config):
        return config
    try:
        urls = msgspec.json.decode((run / _FILE).read_bytes(), type=dict[int, str])
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(
            f"the addresses of the reward servers cannot be read from {run / _FILE}: {error}"
        ) from error
    return with_urls(config, urls)


def with_urls(config: RewardConfig, urls: Mapping[int, str]) -> RewardConfig:
    """Return a copy in which functions use these servers, by the functions' indices."""
    functions = list(config.functions)
    for index, url in urls.items():
        given = functions[index].args.items()
        own = {key: value for key, value in given if key not in reward_model.SERVER_ARGS}
        functions[index] = functions[index].model_copy(update={"args": own | {"url": url}})
    return config.model_copy(update={"functions": tuple(functions)})


@contextlib.asynccontextmanager
async def served(
    config: RewardConfig, logs: Path, say: Callable[[str], None]
) -> AsyncIterator[RewardConfig]:
    """Yield the configuration with the addresses of running servers, which score a trial text.

    Raises UserError if one does not within `rewards.startup_seconds`.
    """
    servers: dict[int, _Server] = {}
    keeping: list[asyncio.Task[None]] = []
    try:
        for index, args in _served_here(config).items():
            servers[index] = _Server(args, logs / f"reward-server-{index}.log", say)
        found = with_urls(config, {index: server.url for index, server in servers.items()})
        for index, server in servers.items():
            args = found.functions[index].args
            await server.until_ready(index, args, config.startup_seconds)
        keeping += [asyncio.create_task(server.keep()) for server in servers.values()]
        yield found
    finally:
        for task in keeping:
            task.cancel()
        for server in servers.values():
            server.process.terminate()
        for server in servers.values():
            await server.close()


async def open_reward_servers(
    config: RewardConfig,
    run: Path,
    say: Callable[[str], None],
    closing: contextlib.AsyncExitStack,
) -> None:
    """Start the reward servers of a run until `closing` ends. Raises UserError as `served`."""
    found = await closing.enter_async_context(served(config, run / "logs", say))
    urls = {index: found.functions[index].args["url"] for index in _served_here(config)}
    if urls:
        write_atomically(run / _FILE, msgspec.json.encode(urls).decode())
    for index, url in urls.items():
        model = config.functions[index].args["model"]
        say(f"reward model {model} is served at {url}, on the CPU")
