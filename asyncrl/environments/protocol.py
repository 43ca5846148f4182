"""The protocol of environments: a class with `reset` and `step`, sync or async. No base class.

    class Echo:
        replay = "deterministic"

        def reset(self, row, seed):
            return [{"role": "user", "content": row["prompt"]}]

        def step(self, action):
            return StepResult(f"you said {action.text}", done=len(action.text) > 20, reward=0.1)

        def close(self): ...                     # optional

One instance serves one sample: `reset`, which may return messages or a text that replace the row's
prompt, then `step` for each turn, then `close`. Optional:

- `snapshot()` returns a state, which stays in its process, and `restore(state)` goes back to it,
  even after a step that has raised. The state must not change with the environment, so it is
  usually a deep copy;
- `replay` says what happens if the same row, seed and actions are repeated. "deterministic": the
  same observations; a difference is an error. "recorded": the state depends on the actions only,
  and the recorded observations stand;
- `tools`: schemas for the chat template;
- a step may begin a new conversation (`StepResult.new_conversation`), which is all that the policy
  then reads; each turn is trained on in the conversation in which it was drawn;
- `max_turn_tokens`: longest next turn, only for an environment that cannot go back.

An environment with neither `replay` nor `snapshot` cannot go back. Its samples are never verified:
when verification is due, they start over. Import-light: worker processes load this file.
"""

import inspect
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from asyncrl.rewards.values import MAX_FLOAT32

Message = dict[str, Any]
"""A chat message: `role`, `content`, and other fields of the chat template (`tool_calls`, ...)."""
Observation = list[Message] | str | list[int]
"""The policy's next input: messages, one text, or token ids."""
Replay = Literal["deterministic", "recorded"]

FailureReason = Literal[
    "raised", "timeout", "died", "wrong_type", "not_finite", "too_long", "too_many_processes",
    "not_deterministic", "not_loaded", "unavailable",
]  # fmt: skip
"""The reason why an environment did not answer: it raised, timed out, lost its process, violated
the protocol, returned a reward that is not finite or an observation that is too long, started too
many processes, or answered the same actions differently although it is `deterministic`; it could
not be loaded again in a new process; or a service that it needs is down."""

UNSCORED: frozenset[FailureReason] = frozenset({"not_deterministic", "not_loaded", "unavailable"})
"""Failures that do not concern the policy's turns, like all failures of `reset`."""

LABEL = "environment"
"""Label of an environment's reward and failures, next to those of the reward functions."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy, the argument of `step`."""

    text: str
    """The turn without special tokens."""
    tokens: list[int]
    """All tokens of the turn, as drawn."""
    message: Message
    """The turn as a chat message: role "assistant", `content`, and `tool_calls` if it has any."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """The calls found in the turn, each with `name` and `arguments`."""
    context_length: int = 0
    """Tokens that the policy read before this turn."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `step`; a dict, or a tuple in this order, is accepted too."""

    observation: Observation | None = None
    """None or empty only with `done`."""
    done: bool = False
    """The sample ends with this turn."""
    reward: float = 0.0
    """The turn's reward; a sample's reward is their sum."""
    info: dict[str, Any] = field(default_factory=dict)
    """Data for the user only; it is not passed on."""
    new_conversation: bool = False
    """The observation is a whole conversation, which replaces the present one."""
    tools: list[dict[str, Any]] | None = None
    """Schemas of a new conversation; None: the environment's own."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The optional capabilities of an environment, read from its object after `reset`."""

    replay: Replay | None = None
    restores: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def goes_back(self) -> bool:
        """True if its samples can be verified."""
        return self.replay is not None or self.restores


class BadAnswerError(Exception):
    """An environment's return value violates the protocol."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


def _wrong(message: str) -> BadAnswerError:
    return BadAnswerError("wrong_type", message)


def check_methods(environment: Any) -> None:
    """Refuse an environment without callable methods. Raises BadAnswerError."""
    for name, shown_as, arguments in (
        ("reset", "reset(row, seed)", ({}, 0)),
        ("step", "step(action)", (None,)),
    ):
        method = getattr(environment, name, None)
        if not callable(method):
            raise _wrong(f"it has no method {shown_as}")
        try:
            signature = inspect.signature(method, follow_wrapped=False)
        except (ValueError, TypeError):  # some written in C have none
            continue
        try:
            signature.bind(*arguments)
        except TypeError as error:
            text = f"it cannot be called as {shown_as}: {error}; its signature is {signature}"
            raise _wrong(text) from error


def traits_of(environment: Any) -> Traits:
    """Read an environment's optional parts. Raises BadAnswerError."""
    replay = getattr(environment, "replay", None)
    if replay not in (None, "deterministic", "recorded"):
        raise _wrong(f'`replay` must be "deterministic", "recorded" or None, got {shown(replay)}')
    both = [callable(getattr(environment, name, None)) for name in ("snapshot", "restore")]
    if any(both) and not all(both):
        raise _wrong("`snapshot` and `restore` belong together; it has only one of them")
    return Traits(replay, all(both), checked_tools(getattr(environment, "tools", None) or []))


def max_turn_tokens_of(environment: Any, traits: Traits) -> int | None:
    """Return the limit of the next turn; None: `sampling.max_tokens`. Raises BadAnswerError."""
    limit = getattr(environment, "max_turn_tokens", None)
    if limit is None:
        return None
    if not _is_token(limit) or limit < 1 or traits.goes_back:
        raise _wrong(
            "`max_turn_tokens` must be a whole number from 1, and only an environment without "
            f"`replay` and `restore` may have it, got {shown(limit)}"
        )
    return int(limit)


def checked_reset(result: Any) -> list[Message] | str | None:
    """Validate the result of `reset`. Raises BadAnswerError."""
    if result is None:
        return None
    observation = _observation(result, "reset must return messages, a text or None")
    if not observation or isinstance(observation[0], int):
        raise _wrong(f"reset must return messages, a text or None, got {shown(result)}")
    return observation  # type: ignore[return-value]  # no token ids: just checked


def checked_step(result: Any) -> StepResult:
    """Validate the result of `step`. Raises BadAnswerError."""
    given = _parts(result)
    observation, done = given.observation, _bool("done", given.done)
    if observation is not None:
        observation = _observation(observation, "observation must be messages, a text or token ids")
    if not observation and not done:
        raise _wrong(
            f"the observation is {shown(observation)}, but `done` is False: the policy needs "
            "something to answer"
        )
    begins, tools = _bool("new_conversation", given.new_conversation), given.tools
    if tools is not None:
        tools = checked_tools(tools)
        if not begins:
            raise _wrong("a step's `tools` are those of a new conversation: set it as well")
    return StepResult(observation, done, _reward(given.reward), given.info, begins, tools)


def _parts(result: Any) -> StepResult:
    """Convert a result to a `StepResult` without validating its values."""
    names = tuple(one.name for one in fields(StepResult))
    if isinstance(result, Mapping):
        unknown = [str(key) for key in result if key not in names]
        if unknown:
            raise _wrong(
                f"step returned a dict with the unknown keys {', '.join(sorted(unknown))}; it may "
                f"have {', '.join(names)}"
            )
        result = StepResult(**result)
    elif isinstance(result, tuple) and 2 <= len(result) <= len(names):
        result = StepResult(*result)
    elif not all(hasattr(result, name) for name in names[:3]):
        raise _wrong(
            "step must return a StepResult, or a dict or tuple of observation, done, reward and "
            f"info, got {shown(result)}{_hint(result)}"
        )
    info = getattr(result, "info", None)
    kept = dict(info) if isinstance(info, Mapping) else {}
    begins, tools = getattr(result, "new_conversation", False), getattr(result, "tools", None)
    return StepResult(result.observation, result.done, result.reward, kept, begins, tools)


def _observation(value: Any, rule: str) -> Observation:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        if all(isinstance(one, Mapping) for one in value):
            return [_message(dict(one)) for one in value]
        if all(_is_token(one) for one in value):
            return [int(one) for one in value]
    raise _wrong(f"{rule}, got {shown(value)}{_hint(value)}")


def _message(message: Message) -> Message:
    if not isinstance(message.get("role"), str):
        raise _wrong(f"a message needs a `role`, got {shown(message)}")
    if "content" not in message and "tool_calls" not in message:
        raise _wrong(f"a message needs `content`, got {shown(message)}")
    return message


def _reward(reward: Any) -> float:
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
        raise _wrong(f"`reward` must be a number, got {shown(reward)}")
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _wrong(f"`reward` must be a number, got {shown(reward)} ({error})") from error
    if not math.isfinite(value) or abs(value) > MAX_FLOAT32:
        raise BadAnswerError("not_finite", f"`reward` must be finite in float32, got {value}")
    return value


def checked_tools(tools: Any) -> list[dict[str, Any]]:
    """Validate tool schemas for chat templates and `tool_calls`. Raises BadAnswerError.

    A schema is `{"type": "function", "function": {"name": ...}}`, or the inner object alone.
    """
    if not isinstance(tools, list | tuple) or not all(isinstance(one, Mapping) for one in tools):
        raise _wrong(f"`tools` must be a list of schemas, got {shown(tools)}")
    for one in tools:
        function = one.get("function", one)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise _wrong(
                'each of `tools` must be {"type": "function", "function": {"name": ..., '
                f'"parameters": ...}}}}, with a text as name, got {shown(one)}'
            )
    return [dict(one) for one in tools]


def _is_token(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and 0 <= value < 2**31


def _bool(name: str, value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    order = "; a tuple is (observation, done, reward, info)" if name == "done" else ""
    raise _wrong(f"`{name}` must be True or False, got {shown(value)}{order}")


def _hint(value: Any) -> str:
    return "; declare the method with `async def`" if inspect.isawaitable(value) else ""


def shown(value: Any) -> str:
    """Describe a user's value for an error message: its type and a part of it."""
    try:
        return f"{type(value).__name__} {reprlib.repr(value)}"
    except Exception:  # noqa: BLE001 - the user's own __repr__
        return f"{type(value).__name__} that cannot be printed"
