"""Rewards that ask a server: the breaker, retries, a judge's score, servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from reward_models import answering
from reward_pools import running

from asyncrl.errors import RewardError, RewardFailed
from asyncrl.rewards import judge as judging
from asyncrl.rewards import reward_model
from asyncrl.rewards.functions import load_function
from asyncrl.rewards.services import calls
from asyncrl.rewards.services.client import Breaker, Client, close_clients
from asyncrl.rewards.services.settings import Limits
from asyncrl.rewards.values import NoRewardError
from asyncrl.user_code.process import environment

KEY = "sk-a-secret-of-the-test"


# ------------------------------------------------------------------------------ pure parts


@given(st.integers(1, 4), st.lists(st.sampled_from(["ok", "fail", "wait"]), max_size=40))
def test_a_breaker_lets_one_call_through_at_a_time_while_it_is_open(
    failures: int, happens: list[str]
) -> None:
    now, in_a_row, last = 0.0, 0, 0.0
    breaker = Breaker(failures, 10.0, lambda: now)
    for what in happens:
        if what == "wait":
            now += 6.0
            continue
        probe = breaker.is_open
        assert breaker.admits() == (in_a_row < failures or now - last >= 10.0)
        if probe and now - last < 10.0:
            continue
        if probe:  # no second call beside it, whatever becomes of calls from before
            assert not breaker.admits()
            assert not breaker.failed()
            in_a_row += 1
        if what == "ok":
            breaker.succeeded()
            in_a_row = 0
        else:
            in_a_row += 1
            last = now
            assert breaker.failed(probe=probe) == (in_a_row >= failures)
        assert breaker.is_open == (in_a_row >= failures)


def test_calls_from_before_it_opened_do_not_keep_a_breaker_open() -> None:
    now = 0.0
    breaker = Breaker(2, 10.0, lambda: now)
    assert all(breaker.admits() for _ in range(4))
    assert [breaker.failed() for _ in range(3)] == [False, True, False]
    now = 10.0
    assert breaker.admits()
    breaker.succeeded()
    assert not breaker.is_open


GOOD: dict[str, dict[str, Any]] = {
    "judge": {
        "base_url": "http://127.0.0.1:1/v1",
        "model": "m",
        "template": "{response}",
        "score_pattern": r"(\d)",
    },
    "reward_model": {"url": "http://127.0.0.1:1"},
}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("judge", {"base_url": "127.0.0.1:1"}, "args.base_url must be a URL"),
        ("judge", {"base_url": "https://me:secret@host/v1"}, "holds a user name or a password"),
        ("judge", {"model": ""}, "needs args.model"),
        ("judge", {"template": None}, "needs either args.template or"),
        ("judge", {"template": "no place"}, "lacks the placeholder {response}"),
        ("judge", {"template": None, "template_file": "/nowhere"}, "args.template_file"),
        ("judge", {"score_pattern": None}, "needs either args.score_pattern"),
        ("judge", {"score_pattern": "("}, "args.score_pattern"),
        ("judge", {"score_pattern": "a"}, "must have one group"),
        ("judge", {"score_field": "score"}, "needs either args"),
        ("judge", {"minimum": 2, "maximum": 1}, "above args.maximum"),
        ("judge", {"attempts": 0}, "args.attempts must be a whole number from 1"),
        ("judge", {"body": {"n": 2}}, "args.body.n is set by the reward"),
        ("judge", {"api_key_env": "ASYNCRL_NO_SUCH"}, "ASYNCRL_NO_SUCH (args.api_key_env) is not"),
        ("judge", {"api_key": "sk-1"}, "unexpected keyword argument 'api_key'"),
        ("reward_model", {"url": None}, "needs either args.url"),
        ("reward_model", {"model": "x"}, "needs either args"),
        ("reward_model", {"max_tokens": 5}, "args.max_tokens is for a server that the run starts"),
        ("reward_model", {"url": None, "model": "a/b", "pair": True}, "for a server of args.url"),
        ("reward_model", {"server": "sglang"}, "SGLang scores a text as it is"),
        ("reward_model", {"server": "llama"}, "args.server must be vllm, sglang, tei"),
        ("reward_model", {"template": "{prompt}"}, "must be a text with {response}"),
        ("reward_model", {"template": "{response}", "pair": True}, "not both"),
        ("reward_model", {"url": None, "model": "/nowhere"}, "there is no folder /nowhere"),
        ("reward_model", {"url": "ftp://host"}, "args.url must be a URL"),
    ],
)
def test_arguments_with_which_no_call_can_succeed_are_refused(
    name: str, changes: dict[str, Any], says: str
) -> None:
    load_function(name, GOOD[name])
    args = {key: value for key, value in (GOOD[name] | changes).items() if value is not None}
    with pytest.raises(RewardError) as refused:
        load_function(name, args)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_key_comes_from_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o644)
    args = GOOD["judge"] | {"api_key_file": str(path)}
    with pytest.raises(RewardError, match="mode 0644"):
        load_function("judge", args)
    path.chmod(0o600)
    load_function("judge", args)
    path.write_text("")
    with pytest.raises(RewardError, match="is empty"):
        load_function("judge", args)
    with pytest.raises(RewardError, match="not both"):
        load_function("judge", args | {"api_key_env": "HOME"})


def test_a_causal_model_is_no_reward_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    reason = reward_model.no_classifier(str(tmp_path))
    assert reason is not None
    assert "is a LlamaForCausalLM, not a sequence classifier" in reason


# ------------------------------------------------------------------- servers that misbehave


class Faulty:
    """Answers as the request's `do` says, and counts what it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.peers: set[Any] = set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        do = (await request.json())["do"]
        self.asked[do] += 1
        self.peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        known: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "hang": self._hang,
            "huge": self._huge,
        }
        if do in known:
            return await known[do](request)
        if do == "flaky" and self.asked[do] < 3:
            return web.Response(status=503, text="starting")
        if do == "throttled" and self.asked[do] < 2:
            return web.Response(status=429, headers={"Retry-After": "1"})
        if do == "cut" and request.transport is not None:
            request.transport.abort()
        answers = {
            "garbage": web.Response(text="<html>"),
            "down": web.Response(status=500, text="out of order"),
            "patient": web.Response(status=503, headers={"Retry-After": "3600"}),
            "forbidden": web.Response(status=401, text=f"wrong key {KEY}"),
            "odd": web.Response(status=422, text=f"too long {KEY}"),
            "away": web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        }
        return answers.get(do) or web.json_response({"key": request.headers["Authorization"]})

    async def _hang(self, _request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(600)
        return web.Response()

    async def _huge(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(64):
            await response.write(b" " * (1 << 20))
        return response


def limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {
        "concurrency": 4,
        "attempts": 3,
        "attempt_seconds": None,
        "breaker_failures": 3,
        "breaker_seconds": 600.0,
    }
    return Limits(**values | changes)


async def _ask(client: Client, do: str, seconds: float = 60.0) -> tuple[str, str, Any]:
    """The reason and the text of the failure (empty: none), and the use that was reported."""
    state = calls.begin(seconds)
    try:
        await client.post("/ask", {"do": do})
    except NoRewardError as error:
        return error.reason, str(error), state.uses[-1]
    return "", "", state.uses[-1]


def test_what_a_server_may_do_to_a_call() -> None:
    async def check() -> None:
        faulty = Faulty()
        async with answering(faulty) as url:
            client = Client("the server", url, KEY, limits(breaker_failures=100))
            assert (await _ask(client, "fine"))[0] == ""
            reason, _, used = await _ask(client, "flaky")
            assert (reason, used.requests, used.retries) == ("", 3, {"server_error": 2})
            reason, _, used = await _ask(client, "throttled")
            assert (reason, used.retries, used.seconds >= 1.0) == ("", {"throttled": 1}, True)
            for do, expected, asked, says in (
                ("garbage", "garbage", 1, "the answer is not JSON: <html>"),
                ("huge", "garbage", 1, "exceeds 4 MiB"),
                ("down", "unavailable", 3, "500 Internal Server Error (attempt 3): out of order"),
                (
                    "patient",
                    "unavailable",
                    1,
                    "the server allows the next one in 3600 s, which is too late",
                ),
                ("forbidden", "denied", 1, "the server: 401 Unauthorized"),
                ("odd", "refused", 1, "too long ***"),
                ("away", "denied", 1, "302"),
                ("cut", "unavailable", 3, "(attempt 3)"),
            ):
                reason, text, _ = await _ask(client, do)
                assert (reason, faulty.asked[do]) == (expected, asked), do
                assert says in text, (do, text)
                assert KEY not in text
            reason, text, _ = await _ask(client, "hang", seconds=0.5)
            assert (reason, "it did not answer at attempt 1" in text) == ("timeout", True)
            peers = len(faulty.peers)
            for _ in range(5):  # connections are kept
                assert (await _ask(client, "fine"))[0] == ""
            assert len(faulty.peers) <= peers + 1
            impatient = Client("it", url, KEY, limits(attempt_seconds=0.1))
            reason, text, used = await _ask(impatient, "hang")
            assert (reason, used.retries) == ("unavailable", {"timeout": 2})
            await impatient.close()
            await client.close()
        gone = Client("it", url, None, limits())
        assert (await _ask(gone, "fine"))[0] == "unavailable"
        await gone.close()

    asyncio.run(check())


def test_a_server_outside_is_reached_through_the_environments_proxy_this_machine_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def reason(url: str) -> str:
        client = Client("it", url, KEY, limits(attempts=1))
        found = (await _ask(client, "fine"))[0]
        await client.close()
        return found

    async def check() -> None:
        async with answering(Faulty()) as url:
            monkeypatch.setenv("http_proxy", url)
            assert await reason("http://judge.example") == ""
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
            assert await reason(url) == ""
            assert await reason("http://judge.example") == "unavailable"
            monkeypatch.setenv("no_proxy", "here.example,*")
            assert environment()["NO_PROXY"] == "*"

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "here.example")
    direct = "here.example,localhost,127.0.0.1,::1"
    assert (environment()["no_proxy"], environment()["NO_PROXY"]) == (direct, direct)
    asyncio.run(check())


def test_after_failures_in_a_row_the_server_is_left_alone() -> None:
    async def check() -> None:
        faulty = Faulty()
        async with answering(faulty) as url:
            client = Client("it", url, KEY, limits(attempts=1))
            for opened in (False, False, True):
                reason, _, used = await _ask(client, "down")
                assert (reason, used.opened) == ("unavailable", opened)
            reason, text, used = await _ask(client, "fine")
            assert (reason, used.requests) == ("breaker_open", 0)
            assert "after 3 failed calls in a row" in text
            assert faulty.asked == Counter(down=3)
            await client.close()
            # A sample that the server refuses says nothing of the server.
            picky = Client("it", url, KEY, limits(attempts=1))
            reasons = [(await _ask(picky, "odd"))[0] for _ in range(5)]
            assert reasons == ["refused"] * 5
            await picky.close()

    asyncio.run(check())


SERVERS: dict[str, tuple[dict[str, Any], str, dict[str, Any], Any]] = {
    "chat": (
        {"truncate": "left"},
        "/classify",
        {
            "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
            "use_activation": False,
            "truncate_prompt_tokens": -1,
            "truncation_side": "left",
        },
        {"data": [{"index": 0, "probs": [-1.25]}]},
    ),
    "text": (
        {"template": "{prompt}: {response}"},
        "/classify",
        {"input": "Q: A", "use_activation": False},
        {"data": [{"index": 0, "probs": [-1.25]}]},
    ),
    "pair": (
        {"pair": True},
        "/v1/score",
        {"text_1": "Q", "text_2": "A", "use_activation": False},
        {"data": [{"index": 0, "score": -1.25}]},
    ),
    "sglang": (
        {"server": "sglang", "template": "{prompt}: {response}", "label": 1},
        "/classify",
        {"text": "Q: A"},
        {"embedding": [3.0, -1.25], "meta_info": {}},
    ),
    "tei": (
        {"server": "tei", "label": "bad"},
        "/predict",
        {
            "inputs": ["Q", "A"],
            "raw_scores": True,
            "truncate": False,
            "truncation_direction": "Left",
        },
        [{"score": 3.0, "label": "good"}, {"score": -1.25, "label": "bad"}],
    ),
}


@pytest.mark.parametrize("which", SERVERS)
def test_a_reward_model_is_asked_as_its_server_wants_it(which: str) -> None:
    args, path, body, answer = SERVERS[which]

    async def check() -> None:
        asked: list[Any] = []

        async def serve(request: web.Request) -> web.StreamResponse:
            asked.append((request.path, await request.json()))
            assert "Authorization" not in request.headers
            return web.json_response(answer)

        async with answering(serve) as url:
            try:
                given = args | {"url": url}
                load_function("reward_model", given)
                assert await reward_model.reward_model("Q", "A", {}, **given) == -1.25
                assert asked == [(path, body)]
            finally:
                await close_clients()

    asyncio.run(check())


def test_what_is_made_of_the_outputs_of_a_reward_model() -> None:
    both: dict[int | str, float] = {0: 2.0, 1: -1.0}
    assert reward_model.score_of({0: -3.0}, "none", None) == -3.0
    assert reward_model.score_of({0: -3.0}, "sigmoid", None) == pytest.approx(0.0474258732)
    assert reward_model.score_of(both, "softmax", 1) == pytest.approx(0.0474258732)
    for outputs, apply, label, says in (
        (both, "none", None, r"2 outputs \(0, 1\); choose the score"),
        (both, "none", 2, "2 is not among the outputs 0, 1"),
        ({0: 1.0}, "softmax", None, "always 1"),
    ):
        with pytest.raises(NoRewardError, match=says):
            reward_model.score_of(outputs, apply, label)


def test_a_worker_asks_for_so_much_at_once() -> None:
    async def check() -> None:
        now, most = 0, 0

        async def answer(_request: web.Request) -> web.StreamResponse:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.02)
            now -= 1
            return web.json_response({})

        async with answering(answer) as url:
            client = Client("it", url, None, limits(concurrency=3))
            await asyncio.gather(*(client.post("/ask", {}) for _ in range(12)))
            await client.close()
        assert most == 3

    asyncio.run(check())


def test_a_judge_in_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge beside another reward: weights, terms, failures and counts by function and reason."""
    monkeypatch.setenv("ASYNCRL_TEST_KEY", KEY)
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        body = await request.json()
        asked.append(body)
        text = body["messages"][-1]["content"]
        if "busy" in text and len(asked) % 2:
            return web.Response(status=429, headers={"Retry-After": "0"})
        if body["model"] == "small":
            return web.json_response({"error": "there is no small"}, status=404)
        said = "I do not judge." if "odd" in text else "It is right.\nScore: 8"
        message = {"content": None if "deep" in text else said}
        end = "length" if "deep" in text or "odd" in text else "stop"
        return web.json_response({"choices": [{"message": message, "finish_reason": end}]})

    async def check() -> None:
        async with answering(answer) as url:
            judge = {
                "name": "judge",
                "weight": 0.5,
                "args": {
                    "base_url": f"{url}/v1",
                    "model": "big",
                    "template": "Q: {prompt} A: {response} R: {answer}",
                    "score_pattern": r"Score: (\d+)",
                    "api_key_env": "ASYNCRL_TEST_KEY",
                },
            }
            functions = [judge, {"name": "exact_match"}]
            example = {"answer": "5"}
            async with running(*functions, timeout_seconds=60, on_error="zero") as pool:
                right = await pool.score("2+3", "5", example)
                assert (right.value, right.terms) == (5.0, (8.0, 1.0))
                await pool.score("2+3", "busy", example)
                assert (await pool.score("2+3", "odd", example)).value == 0.0
                deep = await pool.score("2+3", "deep", example)  # its model has only reasoned
                assert (deep.value, deep.verdict) == (0.0, "unscored")
                counts = pool.counts
            assert counts.failed == {"judge": {"no_score": 2}}
            used = counts.services["judge"]
            assert used.requests == len(asked)
            assert used.retries.get("throttled", 0) == len(asked) - 4
            assert set(counts.services) == {"judge"}
            assert asked[0]["messages"] == [{"role": "user", "content": "Q: 2+3 A: 5 R: 5"}]
            assert (asked[0]["model"], asked[0]["temperature"]) == ("big", 0.0)
            async with running(*functions, timeout_seconds=60) as pool:
                with pytest.raises(RewardFailed, match="score_pattern does not match") as failed:
                    await pool.score("2+3", "odd", example)
                assert failed.value.reason == "no_score"
                assert "cut off at args.max_tokens (512)" in str(failed.value)
            args: dict[str, Any] = judge["args"]  # type: ignore[assignment]
            assert await judging.try_once(args, 60.0) is None
            assert await judging.try_once(args | {"template": "odd {response}"}, 60.0) is None
            body = {"max_tokens": None, "max_completion_tokens": 9, "temperature": None}
            assert await judging.try_once(args | {"body": body}, 60.0) is None
            assert asked[-1].keys() == {"model", "messages", "max_completion_tokens"}
            refused = await judging.try_once(args | {"model": "small"}, 60.0)
            assert "404 Not Found" in str(refused)

    asyncio.run(check())
