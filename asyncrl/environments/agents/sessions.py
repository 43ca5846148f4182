"""Agent programs as environments: their HTTP requests become turns of the policy.

    agent ══POST messages══► endpoint ─► reset or step returns them as the observation
    agent ◄══the turn═══════ endpoint ◄─ step(action) brings the turn
    agent returns its reward ──────────► the last step is done

HTTP carries the text only; the generator records tokens, log-probabilities and policy versions, so
a sample is as exact as with any other environment. An agent cannot go back, since its program has
already continued, so its samples start over instead of being verified.
"""

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.environments.agents import openai_messages
from asyncrl.environments.agents.calls import ProgramCalls
from asyncrl.environments.agents.endpoint import Endpoint
from asyncrl.environments.agents.openai_messages import PolicySettings, Turn
from asyncrl.environments.chat_messages import Message
from asyncrl.environments.protocol import Action, StepResult
from asyncrl.environments.workers.user_threads import in_thread
from asyncrl.errors import RewardError
from asyncrl.user_code import loading as user_functions

_OUTPUT_BYTES = 1 << 20
"""Limit of a command's output in bytes; the same amount of its standard error is kept."""
_SHOWN = 2000
_DRAIN_SECONDS = 2.0
"""Time to drain the pipes of an exited command, which another process may hold open."""

_KIND = user_functions.FunctionKind("agent", "function(row, client)", ({}, None))


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of an agent's client: `OpenAI(base_url=client.base_url, api_key=client.api_key)`."""

    base_url: str
    api_key: str
    model: str
    seed: int
    """The sample's seed, for the agent's own random choices."""

    def __repr__(self) -> str:
        return f"ClientSettings(base_url={self.base_url!r}, model={self.model!r})"


Program = Callable[[dict[str, Any], ClientSettings], Coroutine[Any, Any, Any]]
"""Runs an agent to its end and returns its reward (see `reward_of`)."""


def function_program(name: str, args: dict[str, Any]) -> Program:
    """Runs `module:function` or `file.py:function`. Raises RewardError."""
    function = user_functions.load_function(_KIND, name, args)

    async def run(row: dict[str, Any], client: ClientSettings) -> Any:
        return await in_thread(lambda: _result(function(row, client, **args)))

    return run


def _result(value: Any) -> Any:
    """Return an agent's result; a coroutine runs in an event loop of the agent's thread."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


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
            f"environment agent:command: the program {words[0]!r} does not exist (looked from "
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
        lambda: _Exiting(loop), *words,
        stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True,
    )  # fmt: skip
    process = asyncio.subprocess.Process(transport, protocol, loop)
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise RuntimeError("the command has no pipes")
    output, errors = bytearray(), bytearray()
    reading = [
        asyncio.create_task(_feed(process.stdin, given)),
        asyncio.create_task(_read(process.stdout, output)),
        asyncio.create_task(_read(process.stderr, errors)),
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
            f"{words[0]} must print its reward, a number, as its last line, not {last!r:.200}"
        ) from error


class _Exiting(asyncio.subprocess.SubprocessStreamProtocol):
    """Signals that the process has exited; `Process.wait` also waits for its pipes to be closed."""

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
    """Keep the last bytes of a stream; read all of it so that the writer does not block."""
    while part := await stream.read(1 << 16):
        kept += part
        del kept[:-_OUTPUT_BYTES]


def reward_of(result: Any) -> Any:
    """Return an agent's reward, given as a number or `{"reward": number}`; None is 0."""
    if isinstance(result, dict) and "reward" in result:
        result = result["reward"]
    return 0.0 if result is None else result


COMMAND = "command"
"""The name `agent:command`, whose arguments hold the command line."""


class AgentEnvironment:
    """The agent of one sample. All agents of the process share the endpoint."""

    replay = None

    def __init__(self, program: Program, endpoint: Endpoint) -> None:
        self._program = program
        self._endpoint = endpoint
        self._calls = ProgramCalls()
        self._key = ""
        self.tools: list[dict[str, Any]] = []

    @property
    def max_turn_tokens(self) -> int | None:
        """Limit of the next turn."""
        return self._calls.max_turn_tokens

    async def reset(self, row: dict[str, Any], seed: int) -> list[Message]:
        """Start the agent and return the messages of its first call."""
        await self._endpoint.start()
        self._key = self._endpoint.open(self._calls.answer)
        client = ClientSettings(
            self._endpoint.url, self._key, self._endpoint.policy.model, seed % 2**31
        )
        call = await self._calls.begin(self._program(row, client))
        if call is None:
            self._calls.result()
            raise RuntimeError("the agent ended without a call of the model")
        self.tools = call.tools
        return call.messages

    async def step(self, action: Action) -> StepResult:
        """Answer the agent's call.

        Return its reward, or the messages of its next call: those that extend the conversation, or
        all of them if it is a new one.
        """
        tokens = action.tokens
        cut = self._endpoint.policy.cuts(tokens, self.max_turn_tokens)
        turn = Turn(action.message, len(tokens), cut, action.context_length)
        result = await self._calls.step(turn)
        return result or StepResult(done=True, reward=reward_of(self._calls.result()))

    async def close(self) -> None:
        """End the agent: refuse its calls and cancel its task."""
        self._endpoint.close(self._key)
        await self._calls.close()


def adapter(rest: str, args: dict[str, Any]) -> Callable[[], AgentEnvironment]:
    """Return a factory for `environment.name: agent:REST`; it makes one environment per sample.

    `rest` is `my.module:function`, `path/to/file.py:function` or `command`. `args` holds the
    function's arguments, or a `command` (a list of words), with the policy's settings and `ignore`,
    parameters of requests that need not equal the run's. Raises RewardError if the function does
    not exist or does not take these arguments, or if a parameter cannot be ignored.
    """
    args = dict(args)
    ignore, known = args.pop("ignore", []), openai_messages.IGNORABLE
    if not isinstance(ignore, list | tuple) or not set(map(str, ignore)) <= set(known):
        raise RewardError(
            f"environment.args.ignore must be a list of parameters among {', '.join(known)}, got "
            f"{ignore!r}: parameters that constrain the answer cannot be ignored"
        )
    policy = PolicySettings(**args.pop(openai_messages.POLICY, {}))
    program = command_program(**args) if rest == COMMAND else function_program(rest, args)
    endpoint = Endpoint(policy, ignore)
    return lambda: AgentEnvironment(program, endpoint)
