"""Our part of SGLang's scheduler process, on real SGLang: responses are those of the torch engine.

Tokens are compared, not distributions: a draw is a function of the seed, the place and the
distribution. Two things that the engine's own settings leave out on a CPU are run here: steps that
overlap, as on GPUs, and two tensor-parallel ranks. So each of the two is an engine of its own.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from raw_sglang import RawSglang, serving
from served_sglang import REAL_SGLANG
from tiny_models import STOP, make_qwen3, save
from torch_cores import core_of, load, request, run, tokens_of

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, to_json
from asyncrl.engine.protocol import GenerateRequest
from asyncrl.engine.remote.extras import DrafterSettings
from asyncrl.engine.sglang.messages import EndRequests
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint
from asyncrl.wire.weights.writer import published

pytestmark = [*REAL_SGLANG, pytest.mark.slow]

INSTALLATIONS, MOST_ROUNDS = 9, 100
_WATCHDOG = 6.0
"""Seconds after which SGLang takes a step for hanging."""


class Served:
    """The worker, requests and what the torch engine generates for them."""

    def __init__(
        self,
        sglang: RawSglang,
        path: str,
        model: torch.nn.Module,
        pause_seconds: float,
        *,
        drafts: bool,
    ) -> None:
        self.drafts = drafts
        self.sglang, self.model = sglang, model
        self.pause_seconds = pause_seconds
        rng = np.random.default_rng(5)
        self.requests: list[GenerateRequest] = []
        for i in range(24):
            prompt = rng.integers(0, STOP, int(rng.integers(1, 90))).astype(np.int32)
            how = {
                "temperature": (1.0, 0.7, 1.4)[i % 3],
                "top_p": (1.0, 0.8)[i % 2],
                "max_tokens": 80 if i % 5 else 120,
                "seed": 977 * i + 3,
            }
            self.requests.append(request(f"{i}", prompt, **how))
        torch_engine = core_of(
            load(path, slots=24, max_len=256), max_prefill_tokens=512, max_step_tokens=1000
        )
        chunks = run(torch_engine, self.requests)
        self.tokens = [tokens_of(chunks[one.request_id]) for one in self.requests]
        self.lists = [
            np.concatenate([chunk.topk_ids for chunk in chunks[one.request_id]]).tolist()
            for one in self.requests
        ]
        self.scores = [
            _scores(model, one, tokens)
            for one, tokens in zip(self.requests, self.tokens, strict=True)
        ]
        self.sent: dict[str, tuple[int, int]] = {}
        """By id: index of the request, and its ticket; 0: it is scored."""

    def send(self, which: int, *, score: bool = False, priority: int = 0) -> str:
        """Send a request again; its id."""
        name = f"r{len(self.sent):08d}"
        ticket = 0 if score else len(self.sent) + 1
        self.sent[name] = which, ticket
        one = replace(self.requests[which], priority=priority)
        key = f"k{which}"
        if score:
            tokens = self.tokens[which]
            text = np.concatenate([one.prompt_tokens, np.array(tokens, np.int32)])
            one = replace(one, prompt_tokens=text, sampling=replace(one.sampling, top_p=1.0))
            self.sglang.add(name, one, 0, scored=len(tokens), generated=len(tokens))
        else:
            self.sglang.add(name, one, ticket, cache_key=key)
        return name

    def install(self, model: torch.nn.Module, version: int) -> None:
        """Give it other weights; the versions of later steps are kept in the reports."""
        tensors = model.state_dict()
        with published(tensors.items(), version) as manifest:
            self.sglang.call("asyncrl_begin_staging", msgspec.to_builtins(manifest))
            while (report := self.sglang.call("asyncrl_staging"))["state"] == "running":
                pass
        assert report["state"] == "staged", report
        self.sglang.call("asyncrl_pause")
        self.sglang.call("asyncrl_install", version)
        self.sglang.reports.versions.clear()
        self.sglang.call("asyncrl_resume")

    def differing(self, model: torch.nn.Module) -> list[str]:
        """Tensors of which it holds something else; the feed-forward layers are padded there."""
        tensors = model.state_dict()
        shapes = {name: list(one.shape) for name, one in tensors.items()}
        self.sglang.call("asyncrl_begin_fingerprint", shapes)
        while (found := self.sglang.call("asyncrl_fingerprint")) is None:
            pass
        held, wanted = msgspec.convert(found, Fingerprint), fingerprint(tensors.items())
        assert held.tensors.keys() >= {name for name in tensors if "mlp" not in name}
        return [name for name in held.tensors if held.tensors[name] != wanted.tensors[name]]

    def check(self, name: str, *, cut: bool = False) -> None:
        """Compare a request that has ended with what it should be."""
        which, ticket = self.sent[name]
        reports, end = self.sglang.reports, self.sglang.reports.ends[name]
        assert not end.error, end
        assert cut or end.reason != "abort"
        if not ticket:
            if end.reason != "abort":
                np.testing.assert_allclose(
                    reports.logprobs[name], self.scores[which], rtol=1e-4, atol=1e-5
                )
            return
        got, whole = reports.tokens.get(ticket, []), self.tokens[which]
        assert got == (whole[: len(got)] if end.reason == "abort" else whole)
        assert reports.lists.get(ticket, []) == self.lists[which][: len(got)]
        if end.reason != "abort":
            assert end.reason == ("stop" if whole[-1] == STOP else "length")


def _scores(model: torch.nn.Module, one: GenerateRequest, tokens: list[int]) -> list[float]:
    text = torch.tensor([[*one.prompt_tokens.tolist(), *tokens]])
    with torch.no_grad():
        logits = model(text).logits[0] / one.sampling.temperature
    places = range(len(one.prompt_tokens) - 1, text.shape[1] - 1)
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[i, token]) for i, token in zip(places, tokens, strict=True)]


OVERLAPPING = {
    "disable_overlap_schedule": False,
    "chunked_prefill_size": 16,
    "max_prefill_tokens": 16,
    "max_total_tokens": 900,
    "watchdog_timeout": _WATCHDOG,
}
"""Steps are launched before the ones before them are processed; prompts come in chunks, and KV is
short. SGLang's own tests make it retract requests by the variables below."""
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
TWO_RANKS = {
    "tp_size": 2,
    "speculative_algorithm": "ASYNCRL",
    "speculative_num_draft_tokens": 5,
    "drafting": DrafterSettings(
        cache=CacheConfig(max_draft_tokens=4, min_match=1, min_probability=0.0).model_dump(
            mode="json"
        ),
        place=to_json(CachePlace()),
        fixed_step_tokens=96,
        max_step_tokens=96,
        logits_bytes=1 << 20,
    ),
}
"""They draft too."""
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
"""SGLang asks for a core for each rank."""
CASES = [
    pytest.param((OVERLAPPING, RETRACTING), id="overlapping"),
    pytest.param((TWO_RANKS, BOUND), id="two-ranks"),
]


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("sgl")
    model = make_qwen3()
    path = save(model, folder / "model")
    arguments, variables = request.param
    with serving(folder, path, variables, **arguments) as sglang:
        pause = 2.2 * arguments.get("watchdog_timeout", 0.1)
        yield Served(sglang, path, model, pause, drafts="drafting" in arguments)


def test_responses_are_those_of_the_torch_engine(served: Served) -> None:
    """Also when most of a prompt is found in the radix cache, and however prompts are taken in."""
    for _ in range(2):
        accepted = served.sglang.reports.accepted
        names = [served.send(i) for i in range(len(served.requests))]
        names += [served.send(i, score=True) for i in range(len(served.requests))]
        served.sglang.wait_for(names)
        for name in names:
            served.check(name)
    if served.drafts:
        assert served.sglang.reports.accepted - accepted > sum(map(len, served.tokens)) / 2


def test_whatever_happens_meanwhile_changes_no_token(served: Served) -> None:
    """Interruptions and pauses at any time: an interrupted response has the first of its tokens."""
    rng = random.Random(3)
    ended: set[str] = set()

    def interrupt() -> None:
        some = rng.sample(sorted(served.sent), 3)
        ended.update(some)
        served.sglang.send(EndRequests(some))

    before = len(served.sent)
    for _ in range(120):
        which = rng.randrange(len(served.requests))
        served.send(which, score=rng.random() < 0.2, priority=rng.randrange(3))
        if rng.random() < 0.15:
            interrupt()
        if rng.random() < 0.1:
            served.sglang.call("asyncrl_pause")
            if rng.random() < 0.5:
                interrupt()
            served.sglang.call("asyncrl_resume")
        served.sglang.drain()
    names = [*served.sent][before:]
    served.sglang.wait_for(names)
    for name in names:
        served.check(name, cut=name in ended)
    ends = served.sglang.reports.ends
    assert sum(ends[name].reason == "abort" for name in names) > 5


def test_nothing_is_drawn_in_a_pause_however_long(served: Served) -> None:
    """Also when it is longer than a step may take; what is sent meanwhile is served afterwards."""
    names = [served.send(i) for i in range(len(served.requests))]
    while not served.sglang.reports.tokens.keys() & {served.sent[name][1] for name in names}:
        served.sglang.receive()
    served.sglang.call("asyncrl_pause")
    names.append(served.send(0))
    assert served.sglang.is_silent(served.pause_seconds)
    served.sglang.call("asyncrl_resume")
    served.sglang.wait_for(names)
    for name in names:
        served.check(name)


def old_steps_after_installations(served: Served) -> int:
    """Steps that come after installations though older weights drew them.

    Requests are sent again until INSTALLATIONS had steps after them. Where this process is busy,
    requests end while it installs.
    """
    sglang, other = served.sglang, make_qwen3(seed=5)
    sglang.salt = "weights that change"
    version = found = crossed = 0
    for _ in range(MOST_ROUNDS):
        names = [served.send(i) for i in range(len(served.requests))]
        while not sglang.reports.tokens.keys() & {served.sent[name][1] for name in names}:
            sglang.receive()
        while crossed < INSTALLATIONS and not sglang.reports.ends.keys() >= set(names):
            version += 1
            served.install(other if version % 2 else served.model, version)
            while not (sglang.reports.versions or sglang.reports.ends.keys() >= set(names)):
                sglang.receive()
            crossed += bool(sglang.reports.versions)
            found += sum(one < version for one in sglang.reports.versions)
        sglang.wait_for(names)
        if crossed == INSTALLATIONS:
            break
    assert crossed == INSTALLATIONS
    assert served.differing(other if version % 2 else served.model) == []
    served.install(served.model, 0)
    sglang.salt = "the first weights"
    assert served.differing(served.model) == []
    again = served.send(1)
    sglang.wait_for([again])
    served.check(again)
    return found


def test_no_step_of_older_weights_comes_after_an_installation(served: Served) -> None:
    """All of them came before the pause was answered, overlapped ones too."""
    assert old_steps_after_installations(served) == 0


def test_a_pause_that_leaves_an_overlapped_step_is_seen(served: Served) -> None:
    """SGLang's own `in_place` leaves it for after the pause.

    It has tokens unless it takes in a part of a prompt, which one in five does: none of the
    installations shows it with a probability of 1e-6.
    """
    served.sglang.call("asyncrl_fault", "no drain")
    found = old_steps_after_installations(served)
    served.sglang.call("asyncrl_fault", "none")
    assert (found > 0) == (not served.drafts), "steps of the engine that drafts do not overlap"
