"""`reward_model`: the score of a sequence classifier that `asyncrl reward-server` serves.

Import-light: a worker process loads this file, and the HTTP client with the first call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.services.settings import Limits, check_numbers, check_url, read_secret
from asyncrl.rewards.values import NoRewardError, as_number

NAME = "reward_model"
SERVER_ARGS = ("model", "apply", "label", "max_tokens", "truncate", "threads")
"""Arguments for the server that a run starts; the others are the function's own."""
_KEYS = ("args.token_env", "args.token_file")


async def reward_model(
    prompt: str,
    response: str,
    example: dict[str, Any],
    *,
    url: str | None = None,
    model: str | None = None,
    apply: str = "none",
    label: int | None = None,
    max_tokens: int | None = None,
    truncate: str = "refuse",
    threads: int | None = None,
    token_env: str | None = None,
    token_file: str | None = None,
    concurrency: int = 256,
    attempts: int = 6,
    attempt_seconds: float | None = None,
    breaker_failures: int = 10,
    breaker_seconds: float = 30.0,
) -> float:
    """The score that a reward model gives a response.

    Args:
        prompt: the question.
        response: of the model.
        example: not used.
        url: of a server that runs (`asyncrl reward-server`).
        model: a folder or hub id instead: the run starts one server with it on this machine.
        apply: of `model`'s server: `none`, `sigmoid` or `softmax`.
        label: of `model`'s server: which output counts, if there are several.
        max_tokens: of `model`'s server: the longest text.
        truncate: of `model`'s server: what happens to a longer one, `refuse` or `left`.
        threads: of `model`'s server.
        token_env: environment variable with the server's token.
        token_file: file with it, mode 0600.
        concurrency: most requests of a worker process at once.
        attempts: most attempts of one call.
        attempt_seconds: longest time for one; default: what is left of `rewards.timeout_seconds`.
        breaker_failures: failed calls in a row after which calls fail at once.
        breaker_seconds: after which one call is let through then.

    Raises:
        NoRewardError: the server gave no score.
    """
    del example, model, apply, label, max_tokens, truncate, threads
    if url is None:
        raise NoRewardError(
            "unavailable", "args.model: a run or `asyncrl eval` starts this server, nobody else"
        )
    from asyncrl.rewards.services.client import client_of

    client = client_of(
        f"the reward server {url}",
        f"{url.rstrip('/')}/score",
        _KEYS,
        (token_env, token_file),
        Limits(concurrency, attempts, attempt_seconds, breaker_failures, breaker_seconds),
    )
    answer = await client.post({"prompt": prompt, "response": response})
    if not isinstance(answer, dict) or "score" not in answer:
        raise NoRewardError("garbage", f"the reward server {url} sent no score: {answer!r:.200}")
    return as_number(answer["score"])


def check_args(args: dict[str, Any]) -> None:
    """Refuse arguments with which no call can succeed. Raises RewardError."""
    url, model = args.get("url"), args.get("model")
    if (url is None) == (model is None):
        raise RewardError(
            f"reward {NAME!r} needs args.url (a server that runs: `asyncrl reward-server --model "
            "...`) or args.model (a folder or hub id: the run starts the server itself), one of "
            "the two"
        )
    given = [key for key in SERVER_ARGS if key in args]
    if url is not None:
        if given:
            raise RewardError(
                f"reward {NAME!r}: args.{given[0]} is for a server that the run starts; give it to "
                f"`asyncrl reward-server`, which serves args.url"
            )
        check_url(NAME, "url", url)
    elif args.get("token_env") or args.get("token_file"):
        raise RewardError(f"reward {NAME!r}: a server that the run starts has no token")
    else:
        _check_model(str(model), args)
    check_numbers(NAME, args, {"max_tokens": (int, 2, 1 << 20), "threads": (int, 1, 1024),
                               "label": (int, 0, 1 << 20)})  # fmt: skip
    read_secret(NAME, _KEYS, args.get("token_env"), args.get("token_file"))


def _check_model(model: str, args: dict[str, Any]) -> None:
    for key, allowed in (
        ("apply", ("none", "sigmoid", "softmax")),
        ("truncate", ("refuse", "left")),
    ):
        if args.get(key, allowed[0]) not in allowed:
            raise RewardError(
                f"reward {NAME!r}: args.{key} must be {', '.join(allowed)}, got {args[key]!r}"
            )
    reason = no_classifier(model)
    if reason is not None:
        raise RewardError(f"reward {NAME!r}: args.model: {reason}")


def no_classifier(model: str) -> str | None:
    """Why a folder holds no sequence classifier; None: it does, or it is a hub id."""
    folder = Path(model)
    if not folder.is_dir():
        if model.startswith(("/", ".", "~")) or model.count("/") > 1:
            return f"there is no folder {model} in {Path.cwd()}"
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = config.get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        return f"{folder / 'config.json'} cannot be read: {error}"
    if not any("ForSequenceClassification" in str(one) for one in architectures):
        return (
            f"{model} is a {', '.join(map(str, architectures)) or 'model of no known kind'}, and a "
            "reward model is a sequence classifier (...ForSequenceClassification)"
        )
    return None


async def try_once(args: dict[str, Any], seconds: float) -> str | None:
    """Ask for a trial score; why there is none, None if there is one."""
    from asyncrl.rewards.services.client import refusal

    error = await refusal(reward_model("What is 1+1?", "2", {}, **args), seconds)
    return None if error is None else str(error)


def health_of(url: str, seconds: float = 5.0) -> str | None:
    """Why nothing that is healthy answers at a server's address; None if it does."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{url.rstrip('/')}/health")  # noqa: S310 - http, checked
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds) as answer:
            found = json.loads(answer.read(1 << 16))
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error) or type(error).__name__
    if not isinstance(found, dict) or found.get("serves") != "asyncrl reward model":
        return "what answers there is no `asyncrl reward-server`"
    return None
