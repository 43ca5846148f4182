"""Runs agents: functions in threads of their own, commands in processes of their own.

Import-light: worker processes load this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.environments.workers.user_threads import in_thread
from asyncrl.errors import RewardError
from asyncrl.user_code import loading as user_functions

_OUTPUT_BYTES = 1 << 20
"""A command may print so much, and this much of its errors is kept."""
_SHOWN = 2000
_DRAIN_SECONDS = 2.0
"""For what is still in the pipes of a command that has exited, if something else holds them."""

_KIND = user_functions.FunctionKind(
    noun="agent", signature="function(row, client)", arguments=({}, None), error=RewardError
)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What an agent's client needs: `OpenAI(base_url=client.base_url, api_key=client.api_key)`."""

    base_url: str
    """Of this process's endpoint, on a loopback address."""
    api_key: str
    """Of this sample; it holds until the sample ends."""
    model: str
    """The policy's name; requests may name any."""
    seed: int
    """Of this sample, for the agent's own random choices."""

    def __repr__(self) -> str:
        return f"ClientSettings(base_url={self.base_url!r}, model={self.model!r})"


Program = Callable[[dict[str, Any], ClientSettings], Awaitable[Any]]
"""Runs an agent to its end; what it returns is its reward (`reward_of`)."""


def function_program(name: str, args: dict[str, Any]) -> Program:
    """Runs `module:function` or `file.py:function`. Raises RewardError."""
    function = user_functions.load_function(_KIND, name, args)

    async def run(row: dict[str, Any], client: ClientSettings) -> Any:
        return await in_thread(lambda: _result(function(row, client, **args)))

    return run


def _result(value: Any) -> Any:
    """What an agent returned; an async one runs in an event loop of its thread."""
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        return asyncio.run(wait())
    return value


def command_program(command: Sequence[str] = (), **unknown: Any) -> Program:
    """Runs a command line. Raises RewardError."""
    words = list(command) if isinstance(command, list | tuple) else []
    if unknown or not words or not all(isinstance(word, str) for word in words):
        raise RewardError(
            "environment agent:command needs one argument (environment.args), command: a list of "
            "words such as [python, agent.py]"
        )
    if shutil.which(words[0]) is None:
        raise RewardError(
            f"environment agent:command: there is no program {words[0]!r} to run (looked from "
            f"{Path.cwd()} and in PATH)"
        )

    async def run(row: dict[str, Any], client: ClientSettings) -> Any:
        settings = {
            "OPENAI_BASE_URL": client.base_url,
            "OPENAI_API_KEY": client.api_key,
            "OPENAI_MODEL": client.model,
            "ASYNCRL_SEED": str(client.seed),
        }
        return await _run_command(words, json.dumps(row).encode(), os.environ | settings)

    return run


async def _run_command(words: list[str], given: bytes, environment: dict[str, str]) -> Any:
    pipe = asyncio.subprocess.PIPE
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: _Exiting(loop),
        *words,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        start_new_session=True,
    )
    process = asyncio.subprocess.Process(transport, protocol, loop)
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise RuntimeError("the command has no pipes")
    output, errors = bytearray(), bytearray()
    reading = [
        asyncio.create_task(work)
        for work in (
            _feed(process.stdin, given),
            _read(process.stdout, output),
            _read(process.stderr, errors),
        )
    ]
    try:
        await asyncio.shield(protocol.exited)
        _kill_group(process.pid)  # what it has left behind may hold its pipes open
        await asyncio.wait(reading, timeout=_DRAIN_SECONDS)
    finally:
        _kill_group(process.pid)
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
        transport.close()
        await protocol.exited
    if process.returncode:
        text = errors.decode("utf-8", "replace").strip()[-_SHOWN:]
        raise RuntimeError(f"{words[0]} ended with exit code {process.returncode}: {text}")
    lines = output.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1] if lines else ""
    try:
        return json.loads(last)
    except ValueError as error:
        raise RuntimeError(
            f"{words[0]} must print its reward, a number, as its last line, and printed "
            f"{last!r:.200}"
        ) from error


class _Exiting(asyncio.subprocess.SubprocessStreamProtocol):
    """Says when the process has exited; `Process.wait` also waits until its pipes are closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=1 << 16, loop=loop)
        self.exited: asyncio.Future[None] = loop.create_future()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set_result(None)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def _feed(stream: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it does not read its input
        stream.write(given)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Keep the last bytes of a stream; all of it is read, so that its writer does not block."""
    while part := await stream.read(1 << 16):
        kept += part
        del kept[:-_OUTPUT_BYTES]


def reward_of(result: Any) -> Any:
    """The reward that an agent has returned: a number, or `{"reward": number}`; None is 0.

    Example:
        >>> reward_of({"reward": 0.5}), reward_of(None)
        (0.5, 0.0)
    """
    if isinstance(result, dict) and "reward" in result:
        result = result["reward"]
    return 0.0 if result is None else result
