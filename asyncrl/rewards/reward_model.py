"""`reward_model`: the score of a sequence classifier behind a server: vLLM's, SGLang's or TEI's.

    vllm     POST /classify   {messages} or {input}      data[0].probs, of `pair` POST /v1/score
    sglang   POST /classify   {text}                     embedding
    tei      POST /predict    {inputs: text or pair}     label and score of each output

The server returns logits; this module computes the score. Import-light: worker processes load this
file, and the client only if it is configured.
"""

import json
import math
from pathlib import Path
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.rewards.judge import fill
from asyncrl.rewards.services.settings import Limits, check_numbers, check_url, read_secret
from asyncrl.rewards.values import NoRewardError, as_number
from asyncrl.suggestions import written

NAME = "reward_model"
SERVER_ARGS = ("model", "max_tokens", "threads")
"""Arguments for the server that a run starts; the others are for the function."""
_KEYS = ("args.token_env", "args.token_file")
_CHOICES = {
    "server": ("vllm", "sglang", "tei"),
    "apply": ("none", "sigmoid", "softmax"),
    "truncate": ("refuse", "left"),
}


async def reward_model(
    prompt: str,
    response: str,
    example: dict[str, Any],
    *,
    url: str | None = None,
    server: str = "vllm",
    template: str | None = None,
    pair: bool = False,
    model: str | None = None,
    apply: str = "none",
    label: int | str | None = None,
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
    """Return the reward model's score of a response.

    docs/rewards.md describes the arguments; the last five are `Limits`. The default `template` is a
    conversation of a user and an assistant in the model's chat template, for `tei` a pair of texts.
    Raises NoRewardError if the server does not give a score.
    """
    del example, model, max_tokens, threads
    if url is None:
        why = "args.model: only a run or `asyncrl eval` starts this server"
        raise NoRewardError("unavailable", why)
    from asyncrl.rewards.services.client import client_of

    limits = Limits(concurrency, attempts, attempt_seconds, breaker_failures, breaker_seconds)
    client = client_of(f"the reward server {url}", url, _KEYS, (token_env, token_file), limits)
    text = None if template is None else fill(template, {"prompt": prompt, "response": response})
    answer = await client.post(*_request(server, prompt, response, text, pair, truncate == "left"))
    try:
        outputs = _outputs(server, answer)
    except (KeyError, IndexError, TypeError, AttributeError):
        shown = f"the answer of the reward server {url} has no score: {answer!r:.200}"
        raise NoRewardError("garbage", shown) from None
    return score_of(outputs, apply, label)


def _request(
    server: str, prompt: str, response: str, text: str | None, pair: bool, cut: bool
) -> tuple[str, dict[str, Any]]:
    """Return the request's path and body."""
    if server == "tei":
        inputs = [prompt, response] if text is None else text
        more = {"truncate": cut, "truncation_direction": "Left"}
        return "/predict", {"inputs": inputs, "raw_scores": True} | more
    if server == "sglang":
        return "/classify", {"text": text}
    more = {"truncate_prompt_tokens": -1, "truncation_side": "left"} if cut else {}
    more |= {"use_activation": False}
    if pair:
        return "/v1/score", {"text_1": prompt, "text_2": response} | more
    if text is not None:
        return "/classify", {"input": text} | more
    messages = [("user", prompt), ("assistant", response)]
    return "/classify", {"messages": [{"role": r, "content": c} for r, c in messages]} | more


def _outputs(server: str, answer: Any) -> dict[int | str, float]:
    """Return the model's outputs by number, or by name."""
    if server == "tei":
        return {one["label"]: as_number(one["score"]) for one in answer}
    if server == "sglang":
        found = answer["embedding"]
    else:
        first = answer["data"][0]
        found = first["probs"] if "probs" in first else [first["score"]]
    return {place: as_number(value) for place, value in enumerate(found)}


def score_of(outputs: dict[int | str, float], apply: str, label: int | str | None) -> float:
    """Return the score from a model's outputs. Raises NoRewardError if they do not give one."""
    names = ", ".join(map(str, outputs))
    if label is None and len(outputs) != 1:
        shown = f"the model has {len(outputs)} outputs ({names})"
        raise NoRewardError("garbage", f"{shown}; choose the score with args.label")
    if label is not None and label not in outputs:
        raise NoRewardError("garbage", f"args.label: {label} is not among the outputs {names}")
    if apply == "softmax" and len(outputs) == 1:
        raise NoRewardError("garbage", "the softmax of one output is always 1; use sigmoid")
    value = next(iter(outputs.values())) if label is None else outputs[label]
    if apply == "sigmoid":
        return 0.5 * (1 + math.tanh(value / 2))
    if apply == "softmax":
        return 1 / sum(math.exp(min(other - value, 700.0)) for other in outputs.values())
    return value


def check_args(args: dict[str, Any]) -> None:
    """Refuse arguments with which no call can succeed. Raises RewardError."""
    url, model, server = args.get("url"), args.get("model"), args.get("server", "vllm")
    if (url is None) == (model is None):
        raise RewardError(
            f"reward {NAME!r} needs either args.url (the address of a server, such as `vllm serve "
            "MODEL`) or args.model (a folder or hub id: the run starts the server)"
        )
    for key, allowed in _CHOICES.items():
        if args.get(key, allowed[0]) not in allowed:
            wrong = f"args.{key} must be {', '.join(allowed)}, got {written(args[key])}"
            raise RewardError(f"reward {NAME!r}: {wrong}")
    given = SERVER_ARGS if model is None else ("server", "pair", "token_env", "token_file")
    if unfit := [key for key in given if args.get(key) is not None]:
        whose = "that the run starts" if model is None else "of args.url"
        raise RewardError(f"reward {NAME!r}: args.{unfit[0]} is for a server {whose}")
    if model is not None and (reason := no_classifier(str(model))) is not None:
        raise RewardError(f"reward {NAME!r}: args.model: {reason}")
    if model is None:
        check_url(NAME, "url", url)
    _check_text(args, server)
    check_numbers(NAME, args, {"max_tokens": (int, 2, 1 << 20), "threads": (int, 1, 1024)})
    read_secret(NAME, _KEYS, args.get("token_env"), args.get("token_file"))


def _check_text(args: dict[str, Any], server: str) -> None:
    template = args.get("template")
    if template is None:
        if server == "sglang":
            raise RewardError(
                f"reward {NAME!r}: SGLang scores a text as it is, so it needs args.template, with "
                "the placeholders {prompt} and {response}"
            )
    elif not isinstance(template, str) or "{response}" not in template:
        raise RewardError(f"reward {NAME!r}: args.template must be a text with {{response}}")
    elif args.get("pair"):
        raise RewardError(f"reward {NAME!r}: give args.template or args.pair, not both")
    if args.get("pair") and server != "vllm":
        raise RewardError(f"reward {NAME!r}: args.pair is for vLLM's server")
    if args.get("truncate") == "left" and server == "sglang":
        raise RewardError(f"reward {NAME!r}: SGLang does not support args.truncate: left")


def no_classifier(model: str) -> str | None:
    """Say why a folder is not a sequence classifier; None if it is one, or for a hub id."""
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
        kind = ", ".join(map(str, architectures)) or "model without architectures in config.json"
        return f"{model} is a {kind}, not a sequence classifier (...ForSequenceClassification)"
    return None


async def try_once(args: dict[str, Any], seconds: float) -> str | None:
    """Ask for a trial score; return why it was not given, or None."""
    from asyncrl.rewards.services.client import refusal

    error = await refusal(reward_model("What is 1+1?", "2", {}, **args), seconds)
    return None if error is None else str(error)
