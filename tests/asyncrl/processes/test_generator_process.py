"""The generator process with a fake engine: what `Verify` does to held and running samples."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import AsyncrlError
from asyncrl.processes.activity import Activity
from asyncrl.processes.generator import GeneratorProcess
from asyncrl.processes.writing import Writing, excess
from engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from monitoring.metrics import GeneratorMetrics, new_registry
from monitoring.timeline import Timeline
from rollout.trajectory import KeptTokens, Provenance, SampleId
from trainer.publish import WeightPublisher
from wire.messages import from_generator as fg
from wire.messages import to_generator as tg
from wire.records import EngineStats

SAMPLE = SampleId(group=5, sample=1)
PROMPT = tg.PromptPayload("p", np.array([1, 2], "<i4").tobytes(), {"prompt": "?"})


class FakeEngine:
    """Streams what the test feeds it; remembers requests and which were interrupted, or lost.

    `unreported` is what the engine has drawn of a request when it is interrupted, and not told.
    """

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.chunks: dict[str, asyncio.Queue[TokenChunk]] = {}
        self.interrupted: list[str] = []
        self.abandoned: list[str] = []
        self.serving: set[str] = set()
        self.unreported: dict[str, tuple[list[int], int]] = {}
        self.version = 0
        self.updates: list[tuple[int, set[str]]] = []
        self.paused = False
        self.saved = False

    async def generate(self, request: GenerateRequest) -> Any:
        assert not (self.paused and request.kept is not None)
        self.requests.append(request)
        queue = self.chunks.setdefault(request.request_id, asyncio.Queue())
        ended = False
        self.serving.add(request.request_id)
        try:
            while not ended:
                chunk = await queue.get()
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            self.serving.discard(request.request_id)
            if not ended:
                self.abandoned.append(request.request_id)

    def feed(
        self, name: str, tokens: list[int], version: int, *, verified: int = 0, end: Any = None
    ):
        n = len(tokens)
        provenance = np.full(n, Provenance.SAMPLED, np.uint8)
        provenance[:verified] = Provenance.VERIFIED
        chunk = TokenChunk(
            name,
            np.array(tokens, np.int32),
            np.full(n, -0.5 - version, np.float32),
            np.array(tokens, np.int32)[:, None],
            np.full((n, 1), -0.5 - version, np.float32),
            provenance,
            version,
            end,
        )
        self.chunks.setdefault(name, asyncio.Queue()).put_nowait(chunk)

    async def interrupt(self, name: str) -> None:
        self.interrupted.append(name)
        self.serving.discard(name)
        tokens, version = self.unreported.pop(name, ([], 0))
        self.feed(name, tokens, version, end="abort")

    async def update_weights(self, weights: Any, version: int) -> None:
        self.updates.append((version, set(self.serving)))
        self.version = version

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def save_cache(self) -> int:
        self.saved = True
        return 1

    def stats(self) -> EngineStats:
        return EngineStats(slots=2, policy_version=self.version)


class FakeRewards:
    """The reward is the number of tokens; counts how often it was asked."""

    waiting = running = failed = 0

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: AsyncrlError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, _prompt: str, text: str, _row: Any) -> float:
        self.asked.append(text)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return float(len(text.split()))


class FakeLine:
    """One end of a wire: what the test sends, what the process sent."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: deque[Any] = deque()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        return await self.inbox.get()


class FakeSamples:
    def consider(self, *_: Any, **__: Any) -> None:
        """None is kept for people to read."""


class House:
    """A generator process with two slots among fakes."""

    def __init__(self, **settings: Any) -> None:
        self.engine, self.rewards = FakeEngine(), FakeRewards()
        self.control, self.data = FakeLine(), FakeLine()
        metrics = GeneratorMetrics.register(new_registry(), "g0")
        self.process = GeneratorProcess(
            "g0",
            engine=self.engine,  # type: ignore[arg-type]
            rewards=self.rewards,  # type: ignore[arg-type]
            decode=lambda tokens: " ".join(map(str, tokens)),
            sampling=SamplingParams(max_tokens=8),
            control=self.control,  # type: ignore[arg-type]
            data_line=self.data,  # type: ignore[arg-type]
            samples=FakeSamples(),  # type: ignore[arg-type]
            activity=Activity(Timeline(None, "g0"), metrics),
            metrics=metrics,
            **settings,
        )

    async def say(self, message: tg.ToGenerator) -> None:
        self.control.inbox.put_nowait(message)
        await settle()

    async def delivered(self) -> list[float]:
        """The rewards of what the trainer was sent, once the sample was asked for."""
        await self.say(tg.Deliver(2, (SAMPLE,)))
        return [delivery.reward for delivery in self.data.sent]

    def finished(self) -> list[fg.SampleFinished]:
        return [m for m in self.control.sent if isinstance(m, fg.SampleFinished)]


async def settle() -> None:
    """Let every task run as far as it can; nothing here waits for a clock."""
    for _ in range(30):
        await asyncio.sleep(0)


async def _with_house(scenario: Any, settings: dict[str, Any]) -> None:
    house = House(**settings)
    running = asyncio.create_task(house.process.run(metrics_port=None))
    try:
        async with asyncio.timeout(20):
            await settle()
            await scenario(house)
            await house.say(tg.Shutdown())
            await running
            assert house.engine.saved, "the next process has nothing to draft from"
    finally:
        running.cancel()


def play(scenario: Any, **settings: Any) -> None:
    asyncio.run(_with_house(scenario, settings))


def verify(seed: int = 9, least: int = 2) -> tg.Verify:
    return tg.Verify((SAMPLE,), (seed,), least)


def test_a_held_sample_is_verified_whole_and_keeps_its_reward_if_all_is_accepted():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        house.engine.feed("train-5.1", [3, 4, 5], 1, end="stop")
        await settle()
        assert [f.oldest_version for f in house.finished()] == [1]
        await house.say(verify())
        first, again = house.engine.requests
        assert (first.kept, first.priority, first.sampling.seed) == (None, 1, 7)
        assert again.request_id == "train-5.1-v2"
        assert again.kept is not None
        assert again.kept.tokens.tolist() == [3, 4, 5]
        assert again.kept.logprobs.tolist() == [-1.5, -1.5, -1.5]
        assert (again.priority, again.sampling.seed) == (0, 9)
        house.engine.feed("train-5.1-v2", [3, 4, 5], 2, verified=3, end="stop")
        await settle()
        assert [f.oldest_version for f in house.finished()] == [1, 2]
        await house.say(verify())  # nothing of it is too old any more
        assert len(house.engine.requests) == 2
        assert await house.delivered() == [3.0]
        assert house.rewards.asked == ["3 4 5"]

    play(scenario)


def test_what_was_rejected_is_rewarded_anew_and_counted():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3, 4, 5], 1, end="stop")
        await settle()
        await house.say(verify())
        house.engine.feed("train-5.1-v2", [3, 6], 2, verified=1)
        house.engine.feed("train-5.1-v2", [7, 8], 2, end="stop")
        await settle()
        assert await house.delivered() == [4.0]
        assert house.rewards.asked == ["3 4 5", "3 6 7 8"]
        writer = house.process._writer
        assert (writer.tokens.verified, writer.tokens.rejected) == (1, 2)

    play(scenario)


def test_a_running_sample_is_begun_again_from_what_it_has():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3], 1)
        house.engine.unreported["train-5.1"] = ([4], 1)
        await settle()
        await house.say(verify())
        assert house.engine.interrupted == ["train-5.1"]
        assert not house.engine.abandoned, "tokens were lost, and the cut depends on them"
        kept = house.engine.requests[-1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4]
        await house.say(verify())  # it is being verified already
        assert len(house.engine.requests) == 2
        house.engine.feed("train-5.1-v2", [3, 9], 2, verified=1, end="stop")
        await settle()
        assert [(f.length, f.oldest_version) for f in house.finished()] == [(2, 2)]

    play(scenario)


def test_a_due_sample_that_waits_for_a_slot_waits_no_longer_as_run_ahead_does():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        await house.say(verify())
        assert house.engine.interrupted == ["train-5.1"]
        again = house.engine.requests[-1]
        assert (again.kept, again.priority, again.sampling.seed) == (None, 0, 9)

    play(scenario)


@pytest.mark.parametrize("version", [None, 2])
def test_a_running_sample_without_old_tokens_goes_on(version):
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        if version is not None:
            house.engine.feed("train-5.1", [3], version)
            await settle()
        await house.say(verify())
        assert len(house.engine.requests) == 1
        house.engine.feed("train-5.1", [4], 2, end="stop")
        await settle()
        assert house.finished()[0].oldest_version == 2

    play(scenario)


def test_a_second_verification_before_the_first_has_answered_keeps_the_tokens():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await house.say(verify(least=2))
        await house.say(verify(seed=10, least=3))
        kept = house.engine.requests[-1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4]
        assert house.engine.interrupted == ["train-5.1-v2"]
        assert house.engine.requests[-1].sampling.seed == 10

    play(scenario)


def test_nothing_is_verified_while_paused_and_a_discarded_sample_is_forgotten():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await house.say(tg.Pause())
        await house.say(verify())
        assert len(house.engine.requests) == 1
        await house.say(tg.Resume())
        assert len(house.engine.requests) == 2
        await house.say(tg.Discard((SAMPLE,)))
        assert house.engine.abandoned == ["train-5.1-v2"]
        house.engine.feed("train-5.1-v2", [3, 4], 2, verified=2, end="stop")
        await settle()
        assert len(house.finished()) == 1

    play(scenario)


def test_a_sample_that_ends_as_it_is_interrupted_is_verified_whole():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3], 1)
        await settle()
        house.control.inbox.put_nowait(verify())
        house.engine.feed("train-5.1", [4], 1, end="stop")  # on its way as the order comes
        await settle()
        assert not house.finished()
        kept = house.engine.requests[-1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4]
        house.engine.feed("train-5.1-v2", [3, 4], 2, verified=2, end="stop")
        await settle()
        assert [(f.length, f.oldest_version) for f in house.finished()] == [(2, 2)]

    play(scenario)


def test_a_sample_that_ends_young_enough_as_it_is_interrupted_has_ended():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        house.control.inbox.put_nowait(verify())  # no token of it was reported
        house.engine.feed("train-5.1", [3, 4], 2, end="stop")  # on its way as the order comes
        await settle()
        assert house.engine.interrupted == ["train-5.1"]
        assert len(house.engine.requests) == 1, "it was written on behind its stop token"
        assert [(f.length, f.oldest_version) for f in house.finished()] == [(2, 2)]

    play(scenario)


def test_a_slot_does_not_wait_for_a_reward_but_a_delivery_does():
    async def scenario(house: House) -> None:
        house.rewards.gate.clear()
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        assert [f.length for f in house.finished()] == [2]
        await house.say(verify())
        house.engine.feed("train-5.1-v2", [3, 4], 2, verified=2, end="stop")
        await settle()
        assert await house.delivered() == []
        house.rewards.gate.set()
        await settle()
        assert [delivery.reward for delivery in house.data.sent] == [2.0]
        assert house.rewards.asked == ["3 4"]

    play(scenario)


def test_a_reward_that_fails_is_told_when_the_sample_is_asked_for():
    async def scenario(house: House) -> None:
        house.rewards.error = AsyncrlError("no reward function 'x'")
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        assert await house.delivered() == []
        told = [m for m in house.control.sent if isinstance(m, fg.SampleFailed)]
        assert [(m.sample, m.reason) for m in told] == [(SAMPLE, "no reward function 'x'")]

    play(scenario)


def test_what_is_discarded_while_its_reward_is_computed_is_not_delivered():
    async def scenario(house: House) -> None:
        house.rewards.gate.clear()
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await house.say(tg.Deliver(2, (SAMPLE,)))
        await house.say(tg.Discard((SAMPLE,)))
        house.rewards.gate.set()
        await settle()
        assert not house.data.sent

    play(scenario)


def test_due_work_takes_the_slots_of_run_ahead_which_goes_on_from_its_tokens():
    async def scenario(house: House) -> None:
        ahead = [SampleId(group=8, sample=0), SampleId(group=9, sample=0)]
        for sample in ahead:  # two slots
            await house.say(tg.Generate(sample, PROMPT, 7, priority=1))
            house.engine.feed(f"train-{sample}", [3], 1)
        await settle()
        house.engine.unreported["train-9.0"] = ([4], 1)
        await house.say(tg.Generate(SAMPLE, PROMPT, 5))
        assert house.engine.interrupted == ["train-9.0"], "the one most ahead, and only one"
        again = house.engine.requests[-1]
        assert (again.request_id, again.priority, again.kept) == ("train-9.0+1", 1, None)
        assert again.prefix_tokens.tolist() == [3, 4]
        assert again.sampling.seed == 7
        other = SampleId(group=5, sample=0)
        await house.say(tg.Generate(other, PROMPT, 5))
        assert house.engine.interrupted == ["train-9.0", "train-8.0"]
        house.engine.feed("train-9.0+1", [5], 2, end="stop")
        await settle()
        assert [(f.sample, f.length, f.oldest_version) for f in house.finished()] == [
            (ahead[1], 3, 1)
        ]

    play(scenario)


def test_room_is_made_for_due_work_only_by_those_who_have_slots():
    def writing(group: int, priority: int, **state: Any) -> Writing:
        one = Writing(SampleId(group=group, sample=0), PROMPT, 1, priority)
        for name, value in state.items():
            setattr(one, name, value)
        return one

    def groups(writings: list[Writing], **space: Any) -> list[int]:
        return [w.sample.group for w in excess(writings, **space)]

    ahead = [writing(9, 2, holds=True), writing(7, 1, holds=True), writing(8, 1)]
    assert groups(ahead, slots=1) == [], "run-ahead alone may wait in the engine's queue"
    due = [writing(1, 0), writing(2, 0)]
    assert groups(due + ahead, slots=4) == []
    assert groups(due + ahead, slots=3) == [9]
    assert groups(due + ahead, slots=2) == [9, 7]
    assert groups([writing(1, 0, holds=True), *ahead], slots=3) == [], "it has a slot"
    assert groups([due[0], *ahead], slots=8, kv_full=True) == [9]
    whole = [writing(n, 0, rewarded="held") for n in range(60)]
    many = [writing(n, 1, holds=True) for n in range(100, 164)]
    assert len(groups(whole + many, slots=64)) == 16, "they take turns in a quarter of the slots"
    assert len(groups(whole + many[:4], slots=4)) == 4, "of few slots they get all"


def test_recompute_begins_everything_again_under_the_new_weights(tmp_path):
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3], 1)
        await settle()
        house.engine.unreported["train-5.1"] = ([4], 1)
        with WeightPublisher(tmp_path, "run") as publisher:
            manifest = publisher.publish([("w", torch.zeros(3))], 2)
            await house.say(tg.InstallWeights(manifest, rebuild_kv=True))
        assert house.engine.updates == [(2, set())], "nothing is being served as weights change"
        again = house.engine.requests[-1]
        assert (again.prefix_tokens.tolist(), again.kept) == ([3, 4], None)

    play(scenario)


def test_a_sample_past_its_deadline_ends_with_what_it_has_and_says_so():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        await house.process._end_late_samples()
        assert not house.engine.interrupted, "it has no token yet"
        house.engine.feed("train-5.1", [3], 1)
        house.engine.unreported["train-5.1"] = ([4], 1)
        await settle()
        await house.process._end_late_samples()
        await settle()
        assert [(f.length, f.finish_reason) for f in house.finished()] == [(2, "deadline")]

    play(scenario, deadline=1e-9)


def test_a_pause_counts_towards_no_deadline():
    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        house.engine.feed("train-5.1", [3], 1)
        await settle()
        (writing,) = house.process._writing.values()
        began = writing.began
        await house.say(tg.Pause())
        await house.process._end_late_samples()
        assert not house.engine.interrupted
        await house.say(tg.Resume())
        assert writing.began is not None
        assert began is not None
        assert writing.began > began
        await house.process._end_late_samples()
        assert house.engine.interrupted == ["train-5.1"]

    play(scenario, deadline=1e-9)


def test_a_verification_that_comes_with_the_deadline_gets_a_deadline_of_its_own():
    writing = Writing(SAMPLE, PROMPT, 7)
    writing.builder.append(
        tokens=np.array([3], np.int32),
        logprobs=np.zeros(1, np.float32),
        topk_ids=np.array([[3]], np.int32),
        topk_logprobs=np.zeros((1, 1), np.float32),
        provenance=np.zeros(1, np.uint8),
        policy_version=1,
    )
    writing.began, writing.expired = 1.0, True
    assert writing.order(9, 2)
    assert writing.finish("abort") is None
    writing.turn()
    assert (writing.began, writing.expired) == (None, False)


def test_earlier_rollouts_begin_new_ones_where_the_run_says_so():
    class Earlier:
        remembered: Any = None

        def kept(self, prompt_id: str, sample: int) -> KeptTokens:
            assert (prompt_id, sample) == ("p", 1)
            one = np.zeros((1, 0))
            return KeptTokens(
                np.array([3], np.int32), np.array([-1.0], np.float32), one, one, lenience=1.5
            )

    async def scenario(house: House) -> None:
        await house.say(tg.Generate(SAMPLE, PROMPT, 7))
        kept = house.engine.requests[0].kept
        assert kept is not None
        assert kept.lenience == 1.5

    play(scenario, earlier=Earlier())
