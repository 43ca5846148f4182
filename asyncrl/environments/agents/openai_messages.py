"""Reads OpenAI chat requests and writes the responses. Pure and import-light.

A request may not choose how tokens are drawn, since training is for the run's sampling policy.
Settings that equal the run's are accepted; others are refused with an explanation.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.environments.chat_messages import Message, RefusedCallError, chat_message

POLICY = "__policy__"
"""The environment's argument with the `PolicySettings` as a dict, set by the generator."""

_NO_EFFECT = {
    *("model", "user", "metadata", "store", "stream", "stream_options", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
_ABOUT_TOOLS = {"tool_choice", "parallel_tool_calls"}
"""Parameters that have an effect only if there are tools."""
_LIMITS = ("max_tokens", "max_completion_tokens")
IGNORABLE = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "verbosity"),
    *("chat_template_kwargs", "prediction", "modalities"),
)
"""Parameters that the endpoint may ignore (`environment.args.ignore`): the run's value is used.
Parameters that constrain the answer (`n`, `stop`, limits, log-probabilities) are not among them."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The run's settings for drawing tokens (`sampling`)."""

    model: str = "policy"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    max_tokens: int | None = None
    """Bound of a turn; None if unknown."""

    def cuts(self, tokens: Sequence[int], limit: int | None) -> bool:
        """Return True if this limit has ended a turn, and not a stop token."""
        return limit is not None and len(tokens) >= limit and tokens[-1] not in self.stop_tokens


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request for the next turn of a conversation."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    is_retry: bool = False
    max_tokens: int | None = None
    """The turn is cut at this many tokens, with the finish reason `length`."""
    ignored: dict[str, Any] = field(default_factory=dict)
    """Values that differ from the run's and are not used, by parameter."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, as an agent receives it."""

    message: Message
    tokens: int
    ended_by_limit: bool = False
    prompt_tokens: int = 0

    @property
    def finish_reason(self) -> str:
        """`length` if the turn was cut, `tool_calls` if it calls a tool, otherwise `stop`."""
        if self.ended_by_limit:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


def read_call(
    body: Any, policy: PolicySettings, *, ignore: Sequence[str] = (), is_retry: bool = False
) -> ChatCall:
    """Read a request's JSON.

    The values must equal those of `policy`, except for the parameters in `ignore` (of `IGNORABLE`).
    Raises RefusedCallError if the request is malformed or would need another policy.
    """
    if not isinstance(body, dict):
        raise RefusedCallError("the body is not a JSON object")
    tools = _tools(body.get("tools"))
    ignored = _NO_EFFECT | {"messages", "tools"} | (set() if tools else _ABOUT_TOOLS)
    given = {name: value for name, value in body.items() if name not in ignored}
    differing = _check_parameters(given, policy, ignore)
    limits = [policy.max_tokens, *map(body.get, _LIMITS)]
    said = body.get("messages")
    if not isinstance(said, list) or not said:
        raise RefusedCallError("messages must be a list with at least one", parameter="messages")
    messages = [chat_message(one) for one in said]
    if messages[-1]["role"] == "assistant":
        raise RefusedCallError(
            "the last message is the assistant's, but the policy cannot continue a text that it "
            "has not drawn; end the messages with the user's or a tool's",
            parameter="messages",
        )
    options = body.get("stream_options")
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    stream, most_tokens = bool(body.get("stream")), min(filter(None, limits), default=None)
    return ChatCall(messages, tools, stream, usage, is_retry, most_tokens, differing)


def _check_parameters(
    given: Mapping[str, Any], policy: PolicySettings, ignore: Sequence[str]
) -> dict[str, Any]:
    """Return the ignored values that differ from the run's. Raises RefusedCallError for others."""
    differing = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            _check_parameter(name, value, policy)
        except RefusedCallError as error:
            if name in ignore:
                differing[name] = value
                continue
            if name not in IGNORABLE:
                raise
            text = f"{error}, or ignore it with environment.args: {{ignore: [{name}]}}"
            raise RefusedCallError(text, parameter=name) from error
    return differing


def _check_parameter(name: str, value: Any, policy: PolicySettings) -> None:
    if name in _LIMITS:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefusedCallError(f"{name} must be a whole number from 1", parameter=name)
        return
    if name == "stop":
        given = [value] if isinstance(value, str) else value
        is_texts = isinstance(given, list) and all(isinstance(one, str) for one in given)
        if is_texts and set(given) == set(policy.stop):
            return
        raise RefusedCallError(
            f"stop={value!r} would end turns elsewhere than the run does; leave it out, or set "
            f"sampling.stop of the run, which is {list(policy.stop)}",
            parameter=name,
        )
    own: dict[str, Sequence[Any]] = {
        "temperature": (policy.temperature,),
        "top_p": (policy.top_p,),
        "top_k": (policy.top_k, -1 if policy.top_k == 0 else policy.top_k),
        "min_p": (policy.min_p,),
    }
    same = _OF_EVERY_RUN | own  # accepted values, the run's first
    if name not in same:
        raise RefusedCallError(
            f"{name} is not supported by this endpoint: the run's settings decide how tokens are "
            "drawn; leave it out",
            parameter=name,
        )
    if any(_equal(value, one) for one in same[name]):
        return
    if name in _NOT_SERVED:
        raise RefusedCallError(f"{name}={value!r}: {_NOT_SERVED[name]}", parameter=name)
    raise RefusedCallError(
        f"{name}={value!r} would draw the turns from another policy than the one in training, for "
        f"which it is {same[name][0]!r}; leave it out"
        + (f", or set sampling.{name} of the run" if name not in _OF_EVERY_RUN else ""),
        parameter=name,
    )


def differences(settings: Mapping[str, Any], policy: PolicySettings) -> dict[str, Any]:
    """Return those of a program's sampling settings that differ from the run's."""
    found = {}
    for name, value in settings.items():
        if value is None or name in _NO_EFFECT:
            continue
        try:
            _check_parameter(name, value, policy)
        except RefusedCallError:
            found[name] = value
        else:
            if name in _LIMITS and value < (policy.max_tokens or math.inf):
                found[name] = value
    return found


_OF_EVERY_RUN: dict[str, Sequence[Any]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values without an effect, whatever the run's settings are."""
_NOT_SERVED = {
    "n": "a call is answered with one turn; call again for another one",
    **dict.fromkeys(
        ("logprobs", "top_logprobs"), "log-probabilities are not returned; leave it out"
    ),
}


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return type(value) is type(wanted) and bool(value == wanted)


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(
        isinstance(one, dict)
        and one.get("type") == "function"
        and isinstance(one.get("function"), dict)
        and isinstance(one["function"].get("name"), str)
        for one in tools
    ):
        raise RefusedCallError(
            'tools must be a list of {"type": "function", "function": {"name": ..., ...}}',
            parameter="tools",
        )
    return [dict(one) for one in tools]


def completion(name: str, model: str, created: int, turn: Turn) -> dict[str, Any]:
    """Return the response to a request that does not stream."""
    message = {"role": "assistant", **_parts(turn)}
    choice = {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}
    head = {"id": name, "object": "chat.completion", "created": created, "model": model}
    return {**head, "choices": [choice], "usage": _usage(turn)}


def chunks(
    name: str, model: str, created: int, turn: Turn, *, include_usage: bool
) -> Iterator[dict[str, Any]]:
    """Yield the response as a stream, with the whole turn in one piece, as it arrives complete."""
    head = {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}
    no_usage = {"usage": None} if include_usage else {}

    def piece(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {**head, **no_usage, "choices": [choice]}

    parts = _parts(turn)
    yield piece({"role": "assistant", "content": parts["content"] or ""})
    for index, call in enumerate(parts.get("tool_calls", [])):
        yield piece({"tool_calls": [{"index": index, **call}]})
    yield piece({}, turn.finish_reason)
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(turn)}


def _parts(turn: Turn) -> dict[str, Any]:
    content = turn.message.get("content") or ""
    calls = turn.message.get("tool_calls") or []
    if not calls:
        return {"content": content}
    written = []
    for call in calls:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": call["function"]["name"], "arguments": text}
        written.append({"id": call["id"], "type": "function", "function": function})
    return {"content": content or None, "tool_calls": written}


def _usage(turn: Turn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.tokens,
        "total_tokens": turn.prompt_tokens + turn.tokens,
    }
