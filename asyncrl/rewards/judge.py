"""`judge`: another model scores the response, through an OpenAI-compatible chat endpoint.

The score is the number in the judge's answer: group 1 of `score_pattern` at its last match, or the
field `score_field` of its JSON. An answer without it is a failure (`no_score`), never 0.
Import-light: worker processes load this file, and the client only if it is configured.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import RewardError
from asyncrl.rewards.services.settings import Limits, check_numbers, check_url, read_secret
from asyncrl.rewards.values import NoRewardError

NAME = "judge"
_KEYS = ("args.api_key_env", "args.api_key_file")
_PLACES = re.compile(r"\{(prompt|response|answer)\}")
_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)
_NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*\Z")
_SHOWN = 300
_RESERVED = ("model", "messages", "stream", "n")


class _Message(msgspec.Struct):
    content: str | None = ""


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: Any = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def judge(
    prompt: str,
    response: str,
    example: dict[str, Any],
    *,
    base_url: str,
    model: str,
    template: str | None = None,
    template_file: str | None = None,
    system: str | None = None,
    score_pattern: str | None = None,
    score_field: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    max_tokens: int = 512,
    temperature: float = 0.0,
    body: dict[str, Any] | None = None,
    api_key_env: str | None = None,
    api_key_file: str | None = None,
    concurrency: int = 16,
    attempts: int = 6,
    attempt_seconds: float | None = None,
    breaker_failures: int = 10,
    breaker_seconds: float = 30.0,
) -> float:
    """Return the judge's score of a response.

    docs/rewards.md describes the arguments; the last five are `Limits`. A field of `body` that is
    null removes one of the request. Raises NoRewardError if the judge gives no score, ValueError if
    the template has {answer} and the example does not.
    """
    question = _question(template, template_file)
    right = example.get("answer")
    if right is None and "{answer}" in question:
        raise ValueError("the example has no answer: set task.answer_field, or drop {answer}")
    words = {"prompt": prompt, "response": response, "answer": str(right)}
    messages = [{"role": "user", "content": fill(question, words)}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    from asyncrl.rewards.services.client import client_of

    what, secret = f"the judge {model} at {base_url}", (api_key_env, api_key_file)
    limits = Limits(concurrency, attempts, attempt_seconds, breaker_failures, breaker_seconds)
    client = client_of(what, base_url, _KEYS, secret, limits)
    fields = {"max_tokens": max_tokens, "temperature": temperature} | (body or {})
    request = {key: value for key, value in fields.items() if value is not None}
    request |= {"model": model, "messages": messages}
    answer = await client.post("/chat/completions", request)
    try:
        choice = msgspec.convert(answer, _Completion).choices[0]
    except (msgspec.ValidationError, IndexError):
        text = f"the judge's response is not a chat completion: {_cut(str(answer))}"
        raise NoRewardError("garbage", text) from None
    said = choice.message.content
    try:
        if said is None:  # as when a model has only reasoned
            raise NoRewardError("no_score", f"the judge's answer has no text: {_cut(str(answer))}")
        score = score_in(said, score_pattern, score_field)
    except NoRewardError as error:
        if choice.finish_reason != "length":
            raise
        most = request.get("max_tokens") or request.get("max_completion_tokens")
        cut = f"{error}; the answer was cut off at args.max_tokens ({most})"
        raise NoRewardError(error.reason, cut) from None
    if (minimum is not None and score < minimum) or (maximum is not None and score > maximum):
        raise NoRewardError("no_score", f"the score {score:g} is out of range: {_cut(said)}")
    return score


def fill(template: str, words: dict[str, str]) -> str:
    """Replace all placeholders in one pass, so that `{answer}` in a response stays as it is."""
    return _PLACES.sub(lambda match: words[match.group(1)], template)


async def try_once(args: dict[str, Any], seconds: float) -> str | None:
    """Ask a trial question; return why the judge does not answer it. A missing score is allowed."""
    from asyncrl.rewards.services.client import refusal

    error = await refusal(judge("What is 1+1?", "2", {"answer": "2"}, **args), seconds)
    return None if error is None or error.reason == "no_score" else str(error)


def score_in(said: str, pattern: str | None, field: str | None) -> float:
    """Return the score in a judge's answer. Raises NoRewardError without one."""
    if field is not None:
        return _score_in_json(said, field)
    matches = list(_compiled(pattern or "").finditer(said))
    found = matches[-1].group(1) if matches else None
    if found is None:
        raise NoRewardError("no_score", f"score_pattern does not match the answer {_cut(said)}")
    if _NUMBER.match(found) is None:
        raise NoRewardError("no_score", f"score_pattern matched {_cut(found)}, not a number")
    return float(found)


def _score_in_json(said: str, field: str) -> float:
    fenced = _FENCE.match(said)
    try:
        found: Any = json.loads(fenced.group(1) if fenced else said)
    except (ValueError, RecursionError):
        raise NoRewardError("no_score", f"the judge's answer is not JSON: {_cut(said)}") from None
    for key in field.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, str) and _NUMBER.match(found):
        return float(found)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise NoRewardError("no_score", f"the judge's answer has no number {field!r}: {_cut(said)}")
    try:
        return float(found)
    except OverflowError:
        raise NoRewardError("no_score", f"the judge's score is too large: {_cut(said)}") from None


def check_args(args: dict[str, Any]) -> None:
    """Refuse arguments with which no call can succeed. Raises RewardError."""
    check_url(NAME, "base_url", args.get("base_url"))
    if not isinstance(args.get("model"), str) or not args["model"]:
        raise RewardError(f"reward {NAME!r} needs args.model, the judge's name at the endpoint")
    _check_template(args)
    _check_score(args)
    more: dict[str, Any] = dict.fromkeys(("minimum", "maximum"), (float, -1e30, 1e30))
    more |= {"max_tokens": (int, 1, 1 << 20), "temperature": (float, 0, 100)}
    check_numbers(NAME, args, more)
    taken = [key for key in _RESERVED if key in (args.get("body") or {})]
    if taken:
        raise RewardError(f"reward {NAME!r}: args.body.{taken[0]} is set by the reward itself")
    read_secret(NAME, _KEYS, args.get("api_key_env"), args.get("api_key_file"))


def _check_template(args: dict[str, Any]) -> None:
    template, file = args.get("template"), args.get("template_file")
    if (template is None) == (file is None):
        raise RewardError(
            f"reward {NAME!r} needs either args.template or args.template_file: the judge's "
            "question, with the placeholders {prompt}, {response} and {answer}"
        )
    try:
        text = _question(template, file)
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"reward {NAME!r}: args.template_file: {file}: {error}") from error
    if "{response}" not in text:
        raise RewardError(f"reward {NAME!r}: the template lacks the placeholder {{response}}")


def _check_score(args: dict[str, Any]) -> None:
    pattern, field = args.get("score_pattern"), args.get("score_field")
    if (pattern is None) == (field is None):
        raise RewardError(
            f"reward {NAME!r} needs either args.score_pattern (a regular expression whose group is "
            "the score, such as 'Score: (\\d+)') or args.score_field (a field of a JSON answer)"
        )
    if field is not None and (not isinstance(field, str) or not field):
        raise RewardError(f"reward {NAME!r}: args.score_field must be the name of a field")
    if pattern is not None:
        try:
            groups = _compiled(str(pattern)).groups
        except re.error as error:
            raise RewardError(f"reward {NAME!r}: args.score_pattern: {error}") from error
        if groups != 1:
            text = f"args.score_pattern must have one group, the score, not {groups}"
            raise RewardError(f"reward {NAME!r}: {text}")
    low, high = args.get("minimum"), args.get("maximum")
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        raise RewardError(f"reward {NAME!r}: args.minimum {low:g} is above args.maximum {high:g}")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@cache
def _question(template: str | None, file: str | None) -> str:
    return template if template is not None else Path(str(file)).read_text(encoding="utf-8")


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ...")
