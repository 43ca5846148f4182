"""Environments of the library `verifiers` (0.4): `verifiers:TASKSET`.

The name is an installed taskset package, or a module that can be imported from the folder in which
the run starts. Its tasks are the rows (a row's `idx` is the task's), its `@reward` functions give
the reward, and its environment class plays the episode.

    verifiers: Env ── runs ──► Agent ── calls ──► interception server ── asks ──► _PolicyClient
    asyncrl:   reset, step ◄────────────────── ProgramCalls ◄─────────────────────────┘

verifiers installs a program by `uv` for each episode. Here the agent's program is `PolicyHarness`,
the same loop inside this process, and the model's client asks the policy.

If an environment has several agents, `agent` names the policy; every other agent needs a model and
a client in `env`, and runs our chat program too where verifiers' would be `null`. The first `tasks`
tasks of an endless taskset are used.

Replay is "deterministic": the episode is repeated with the accepted turns, and its answers are
compared. Set `replay: null` for tasks whose tools or users answer at random: their samples start
over.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from asyncrl.environments.adapters.tool_turns import refuse_unknown, replay_of
from asyncrl.environments.agents import openai_messages
from asyncrl.environments.agents.calls import ProgramCalls
from asyncrl.environments.agents.openai_messages import ChatCall, PolicySettings, Turn
from asyncrl.environments.chat_messages import Message, chat_message
from asyncrl.environments.protocol import Action, Replay, StepResult
from asyncrl.errors import RewardError

HARNESS = "asyncrl_policy_harness"
"""The name by which verifiers imports `asyncrl.environments.adapters.verifiers_harness`."""
_MODEL = "policy"


class VerifiersEnvironment:
    """One episode of verifiers, driven by `reset` and `step`."""

    def __init__(self, served: Served, *, replay: Replay | None) -> None:
        self._served = served
        self._calls = ProgramCalls()
        self.replay = replay
        self.tools: list[dict[str, Any]] = []

    async def reset(self, row: dict[str, Any], seed: int) -> list[Message]:
        """Begin an episode of the row's task."""
        del seed
        await self.close()
        index = row.get("idx")
        if not isinstance(index, int):
            raise TypeError("the row has no `idx`, the number of the task in its taskset")
        await self._served.serve()
        self._calls = ProgramCalls()
        call = await self._calls.begin(self._served.episode(index, self._calls))
        if call is None:
            self._raise_errors()
            raise RuntimeError("the episode ended before it called the model")
        self.tools = call.tools
        return call.messages

    async def step(self, action: Action) -> StepResult:
        """Give the policy's turn to the episode."""
        policy, tokens = self._served.policy, action.tokens
        cut = policy.cuts(tokens, policy.max_tokens)
        turn = Turn(action.message, len(tokens), cut, action.context_length)
        result = await self._calls.step(turn)
        if result is not None:
            return result
        self._raise_errors()
        return StepResult(done=True, reward=self._served.reward(self._calls.result()))

    async def close(self) -> None:
        """End the episode."""
        await self._calls.close()

    def _raise_errors(self) -> None:
        episode = self._calls.result()
        errors = [*episode.errors, *(error for one in episode.traces for error in one.errors)]
        if errors:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))


class Served:
    """An environment of verifiers and its servers, shared by the episodes of a worker.

    `settings` is verifiers' `EnvConfig`; `agent` names the policy (None: the only agent); `tasks`
    limits the tasks (None: all); `policy` is how the run draws tokens, against which verifiers'
    settings are compared unless it is None.
    """

    def __init__(
        self,
        taskset: str,
        settings: dict[str, Any],
        agent: str | None,
        tasks: int | None,
        policy: PolicySettings | None,
    ) -> None:
        from verifiers import v1

        config, self._agent = _config(taskset, settings, agent)
        self.notes: list[str] = []
        self.policy = policy or PolicySettings()
        if policy is not None:
            self.notes = _notes(taskset, self._agent, getattr(config, self._agent), policy)
        self._environment = v1.load_environment(config)
        loaded = self._environment.taskset
        if tasks is None and not loaded.bounded:
            raise RewardError(
                f"environment verifiers:{taskset} has an endless taskset; set `tasks` in its args "
                "to the number to use"
            )
        self._tasks = list(loaded if tasks is None else loaded.take(tasks))
        self._serving: contextlib.AsyncExitStack | None = None
        self._lock: asyncio.Lock | None = None
        self._open: dict[str, ProgramCalls] = {}
        client = v1.EvalClientConfig(base_url="http://127.0.0.1:9", api_key_var="NO_KEY")
        self._context = v1.ModelContext(model=_MODEL, client=client)

    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks as rows."""
        return [
            {"idx": task.data.idx, "prompt": task.data.prompt_text or f"task {task.data.idx}"}
            for task in self._tasks
        ]

    async def episode(self, index: int, calls: ProgramCalls) -> Any:
        """Play an episode of a task, whose calls of the policy go to `calls`."""
        if not 0 <= index < len(self._tasks):
            raise IndexError(f"there is no task {index}; the taskset has {len(self._tasks)}")
        traces: list[str] = []

        def minted(trace: Any) -> None:
            traces.append(trace.id)
            self._open[trace.id] = calls

        task = self._tasks[index]
        try:
            return await self._environment.run_episode(task, self._context, on_trace=minted)
        finally:
            for one in traces:
                self._open.pop(one, None)

    def reward(self, episode: Any) -> float:
        """Return the policy's reward. Raises RuntimeError if it is missing or incomplete."""
        traces = [trace for trace in episode.traces if trace.agent.name == self._agent]
        if len(traces) != 1:
            raise RuntimeError(
                f"the episode ran the agent {self._agent!r} {len(traces)} times; a sample is one "
                "conversation"
            )
        if traces[0].stop_condition in ("finalize_timeout", "scoring_timeout"):
            raise RuntimeError(f"its reward is incomplete: {traces[0].stop_condition}")
        return float(traces[0].reward)

    async def turn(self, trace: str | None, call: ChatCall) -> Turn:
        """Return the policy's answer to a call of a trace. Raises RuntimeError if another waits."""
        calls = self._open[str(trace)]
        if calls.is_waiting:
            raise RuntimeError(
                "the program called the model again before the first call was answered; a sample "
                "is one turn after another"
            )
        return await calls.answer(call)

    async def close(self) -> None:
        """End what the episodes share; not needed when a worker process ends."""
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.aclose()

    async def serve(self) -> None:
        """Start what the episodes share. Idempotent."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._serving is not None:
                return
            stack = contextlib.AsyncExitStack()
            await stack.enter_async_context(self._environment.serving())
            # The only use of an interface that is not public: the server asks this client.
            server = self._environment._interception  # noqa: SLF001
            server.clients[self._context.client.model_dump_json()] = _policy_client(self)
            self._serving = stack


def _config(taskset: str, settings: dict[str, Any], agent: str | None) -> tuple[Any, str]:
    """Return verifiers' configuration, and the policy's agent name. Raises RewardError."""
    from verifiers import v1

    from asyncrl.environments.adapters import verifiers_harness

    sys.modules[HARNESS] = verifiers_harness
    given = dict(settings)
    given["taskset"] = {**given.get("taskset", {}), "id": taskset}
    given["interception"] = {"type": "server"}
    config = v1.resolve_env_config(given)
    agents = {name: value for name, value in config if isinstance(value, v1.AgentConfig)}
    name, names = f"environment verifiers:{taskset}", ", ".join(agents)
    if agent is None and len(agents) == 1:
        (agent,) = agents
    if agent is None or agent not in agents:
        raise RewardError(
            f"{name} has the agents {names}; name the one to train in `agent`, got {agent!r}"
        )
    if agents[agent].client is not None:
        raise RewardError(f"{name}: the agent {agent} is the policy; remove its `client`")
    here = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    changed = {agent: agents[agent].model_dump() | here}
    for one, other in agents.items():
        if one == agent:
            continue
        if other.model is None or other.client is None:
            raise RewardError(
                f"{name}: the agent {one} is not the policy, so it needs a model: "
                f"env: {{{one}: {{model: NAME, client: {{type: eval, base_url: URL}}}}}}"
            )
        if other.harness is None or other.harness.id == "null":
            changed[one] = other.model_dump() | here
    return v1.resolve_env_config(config.model_dump() | changed), agent


def _notes(taskset: str, agent: str, config: Any, policy: PolicySettings) -> list[str]:
    settings = {} if config.sampling is None else config.sampling.model_dump(exclude_none=True)
    unused = openai_messages.differences(settings, policy)
    listed = ", ".join(f"{name}: {value!r}" for name, value in unused.items())
    note = (
        f"environment verifiers:{taskset} sets sampling for the agent {agent} ({listed}), which is "
        "not used: the policy uses the run's `sampling`. Set the same values there, or remove these"
    )
    return [note] if unused else []


def _policy_client(served: Served) -> Any:
    from verifiers import v1

    class PolicyClient(v1.Client):  # type: ignore[misc]
        """Answers the model calls of an episode with the policy's turns."""

        async def get_response(
            self,
            dialect: Any,
            body: dict[str, Any],
            sampling: Any,
            session_id: str | None = None,
            turn: Any = None,
            headers: Any = None,
        ) -> Any:
            del sampling, turn, headers
            messages = [chat_message(one) for one in body["messages"]]
            turn = await served.turn(session_id, ChatCall(messages, body.get("tools") or []))
            raw = openai_messages.completion("turn", _MODEL, 0, turn)
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    return PolicyClient()


def adapt(rest: str, args: dict[str, Any]) -> Callable[[], VerifiersEnvironment]:
    """Return a factory for `rest`, a taskset of verifiers. Raises RewardError."""
    name, args = f"verifiers:{rest}", dict(args)
    given = args.pop(openai_messages.POLICY, None)
    policy = None if given is None else PolicySettings(**given)
    refuse_unknown(args, name, ["env", "replay", "agent", "tasks"])
    replay = replay_of(args, name, "deterministic")
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise RewardError(
            f"environment {name} needs verifiers 0.4 or later, which conflicts with vLLM's "
            "packages: install msgspec and verifiers in a separate interpreter and set "
            f"environment.python (docs/environments.md; {error})"
        ) from error
    try:
        served = Served(rest, args.get("env", {}), args.get("agent"), args.get("tasks"), policy)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise RewardError(f"environment {name} cannot be loaded: {error}") from error
    made: Any = functools.partial(VerifiersEnvironment, served, replay=replay)
    made.rows, made.close, made.notes = served.rows, served.close, served.notes
    return made  # type: ignore[no-any-return]
