"""Several steps of vLLM's scheduler in one message."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from served_vllm import REAL_VLLM

from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.remote.client.core import Meter
from asyncrl.engine.remote.client.responses import Response, Responses
from asyncrl.engine.remote.client.streams import Reader, Streams
from asyncrl.engine.vllm.remote import CoreSettings

pytestmark = REAL_VLLM

NAMES = ("r0", "r1")


class Core:
    """Our scheduler over steps that are given, and our output processor behind it.

    Args:
        monkeypatch: takes vLLM's scheduler away.
        steps_per_message: as the setting.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps_per_message: int) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from asyncrl.engine.vllm.client.launch import StepProcessor
        from asyncrl.engine.vllm.worker.scheduler import make_scheduler

        monkeypatch.setattr(Scheduler, "__init__", lambda *_, **__: None)
        monkeypatch.setattr(Scheduler, "has_requests", lambda _: False)
        monkeypatch.setattr(Scheduler, "finish_requests", lambda _, ids, __: self._end(ids))
        monkeypatch.setattr(Scheduler, "make_stats", _stats)
        monkeypatch.setattr(Scheduler, "update_from_output", lambda one, *_: self._vllm(one))
        settings = CoreSettings(steps_per_message).to_config()
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=False), additional_config=settings
        )
        self.scheduler = make_scheduler(config)
        self.scheduler.outbox._clock = lambda: self.now
        self.now = 0.0
        self.responses = Responses(chunk_tokens=1000)
        self.processor = StepProcessor(self.responses)
        self.inboxes = {name: self._open(name) for name in NAMES}
        self.over: set[str] = set()
        self._outputs: list[Any] = []
        self._drafts: Any = None
        self.place = 0

    def _open(self, name: str) -> Response:
        sampling = SamplingParams(999, top_k_logprobs=1)
        request = GenerateRequest(name, "", np.array([1], np.int32), sampling)
        response = Response(request, 7, self.responses)
        self.admit(name, response)
        return response

    def admit(self, name: str, response: Response) -> None:
        """Take in a request."""
        self.processor.request_states[name] = SimpleNamespace(
            queue=response, request_id=name, external_req_id=name, parent_req=None
        )
        self.processor.external_req_ids[name] = [name]

    def _end(self, names: list[str]) -> list[Any]:
        """As vLLM's: those that have not ended before."""
        going = [one for one in names if one not in self.over]
        self.over |= {*names}
        return [SimpleNamespace(request_id=one, client_index=0) for one in going]

    def _vllm(self, scheduler: Any) -> dict[int, Any]:
        from vllm.v1.engine import EngineCoreOutputs

        message = EngineCoreOutputs(outputs=self._outputs)
        message.scheduler_stats = scheduler.make_stats(self._drafts)
        return {0: message} if self._outputs or message.scheduler_stats else {}

    def step(
        self,
        *running: str,
        ended: tuple[str, ...] = (),
        discarded: tuple[str, ...] = (),
        scored: bool = False,
        drafts: int = 0,
    ) -> Any:
        """One token for each request; returns the message if one is sent."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists
        from vllm.v1.spec_decode.metrics import SpecDecodingStats

        self._outputs = [
            EngineCoreOutput(name, [1], finish_reason=FinishReason.STOP if name in ended else None)
            for name in running
            if name not in discarded
        ]
        self._drafts = SpecDecodingStats(4, 1, drafts, drafts - 1) if drafts else None
        self.scheduler.finished_req_ids = set(ended)
        self.over |= {*ended}
        ids = np.arange(self.place, self.place + 2 * len(running), dtype=np.int32).reshape(-1, 2)
        self.place += 2 * len(running)
        tickets = np.array([self.inboxes[name].ticket for name in running], np.int64)
        lists = LogprobsLists(ids, -ids.astype(np.float32), tickets, None) if running else None
        result = SimpleNamespace(
            logprobs=lists,
            req_id_to_index={name: row for row, name in enumerate(running)},
            prompt_logprobs_dict={"other": object()} if scored else {},
        )
        return self.scheduler.update_from_output(None, result).get(0)

    def receive(self, message: Any) -> None:
        """Through vLLM's own encoding, as between its processes."""
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        frames = [bytes(frame) for frame in MsgpackEncoder().encode(message)]
        got = MsgpackDecoder(EngineCoreOutputs).decode(frames)
        self.processor.process_outputs(list(got.outputs), weight_version="3")

    def tokens(self, name: str) -> list[int]:
        """Of the chunks that have come."""
        return [token for chunk in self.inboxes[name]._items for token in chunk.tokens.tolist()]


class Client:
    """What `Streams` asks of vLLM, over this core.

    Args:
        core: gets the requests.
    """

    def __init__(self, core: Core) -> None:
        self.responses, self.meter = core.responses, Meter()
        self.process = SimpleNamespace(ended=None)
        self._core = core

    async def submit(self, name: str, inbox: Any, _: Any) -> None:
        self._core.inboxes[name] = inbox
        self._core.admit(name, inbox)

    async def interrupt(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self._core.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    async def abort(self, _: list[str]) -> None:
        """Nothing: all are over."""


def _stats(_: Any, drafts: Any = None) -> Any:
    from vllm.v1.metrics.stats import SchedulerStats

    return SchedulerStats(spec_decoding_stats=drafts)


def test_a_message_has_the_steps_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(monkeypatch, 3)
    assert core.step("r0", "r1") is None
    assert core.step("r1", "r0") is None
    message = core.step("r0", "r1")
    assert message.scheduler_stats.step_counter == 3
    core.receive(message)
    core.responses.flush()
    assert core.tokens("r0") == [0, 6, 8]  # two tokens of a response in adjacent rows: no draft
    assert core.tokens("r1") == [2, 4, 10]
    assert {0} == {int(p) for chunk in core.inboxes["r0"]._items for p in chunk.provenance}
    assert [core.step("r0") is None for _ in range(6)] == [True, True, False, True, True, False]


@pytest.mark.parametrize("stops", [False, True])
def test_an_interrupted_response_has_all_tokens_that_were_drawn(
    monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """A core that rests after a stop token sends it at once, one that continues waits.

    So a response cut at the last message would be one whose next tokens hold no stop token, and
    they would be drawn again, with another chance to stop (docs/decisions/0011).
    """
    core = Core(monkeypatch, 4)

    async def read() -> tuple[list[int], str | None]:
        reader = Reader()
        chunks: list[Any] = []
        request = GenerateRequest("one", "", np.array([1], np.int32), SamplingParams(999))
        streams = Streams(Client(core))  # type: ignore[arg-type]
        stream = streams.chunks(request, 7, SimpleNamespace(), reader)  # type: ignore[arg-type]
        reading = asyncio.ensure_future(_collect(stream, chunks))
        await asyncio.sleep(0)
        assert core.step("r0", ended=("r0",) if stops else ()) is None
        if stops:
            core.receive(core.step())  # nothing runs any more
        reader.interrupt()
        await asyncio.sleep(0)
        if not stops:
            core.receive(core.step())
        await asyncio.wait_for(reading, 5)
        return [int(one) for chunk in chunks for one in chunk.tokens], chunks[-1].finish_reason

    assert asyncio.run(read()) == ([0], "stop" if stops else None)
    assert not core.scheduler.has_requests()


async def _collect(stream: Any, into: list[Any]) -> None:
    async for chunks in stream:
        into += chunks


def test_the_end_of_an_interrupted_response_waits_for_no_further_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM ends it after a step, before it looks at its tokens: they are dropped."""
    from vllm.v1.request import RequestStatus

    core = Core(monkeypatch, 4)
    assert core.step("r0", "r1") is None
    core.scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
    assert core.scheduler.has_requests()
    core.receive(core.step("r0", "r1", discarded=("r0",)))
    core.responses.flush()
    assert (core.tokens("r0"), core.inboxes["r0"].closed) == ([0], True)
    assert core.tokens("r1") == [2, 6]
    core.scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)  # vLLM asks twice
    assert core.step("r1") is None


def test_the_end_of_a_response_is_no_reason_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """With short responses almost every step has one."""
    core = Core(monkeypatch, 4)
    sent = [core.step("r0", "r1", ended=("r0",) if i == 1 else ()) for i in range(4)]
    assert [message is None for message in sent] == [True, True, True, False]
    core.receive(sent[3])
    core.responses.flush()
    last = core.inboxes["r0"]._items[-1]
    assert (core.tokens("r0"), last.finish_reason) == ([0, 4], "stop")
    assert core.tokens("r1") == [2, 6, 10, 14]


def test_scores_are_sent_at_once_and_a_slow_step_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Core(monkeypatch, 4)
    assert core.step("r0") is None
    assert len(core.step("r0", scored=True).outputs) == 2
    assert core.step("r0") is None
    core.now += 0.2
    assert len(core.step("r0").outputs) == 2


def test_nothing_is_left_when_the_core_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that rests or pauses makes one more step, without tokens."""
    core = Core(monkeypatch, 4)
    assert core.step("r0", ended=("r0",)) is None
    assert core.scheduler.has_requests()
    core.receive(core.step())
    assert core.tokens("r0") == [0]
    assert core.inboxes["r0"].closed
    assert not core.scheduler.has_requests()


def test_drafts_of_all_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(monkeypatch, 4)
    for drafts in (3, 0, 2):
        core.step("r0", drafts=drafts)
    stats = core.step("r0").scheduler_stats
    counted = stats.spec_decoding_stats
    assert (counted.num_draft_tokens, counted.num_accepted_tokens) == (5, 3)
    for _ in range(3):
        core.step("r0")
    assert core.step("r0").scheduler_stats.spec_decoding_stats is None


def test_a_copy_of_checked_parameters_is_what_vllm_would_construct() -> None:
    """Also after vLLM has changed the ones before it, as it does with every request."""
    from vllm.sampling_params import SamplingParams as VllmParams

    from asyncrl.engine.remote.client.core import CoreRequest
    from asyncrl.engine.remote.extras import RequestExtra
    from asyncrl.engine.vllm.client.engine import VllmCore

    core = VllmCore(Mock())
    common = {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True, "detokenize": False}

    def request(limit: int, stops: tuple[int, ...], **extra: int) -> CoreRequest:
        return CoreRequest(
            tokens=[1], max_tokens=limit, temperature=0.7, top_p=0.9, stop_tokens=stops,
            extra=RequestExtra(seed=1, top_k_logprobs=4, **extra), priority=0,
        )  # fmt: skip

    for stops in ((1, 2), (3,)):
        for limit in (5, 9):
            params = core._params_of(request(limit, stops))
            wanted = common | {"max_tokens": limit, "stop_token_ids": list(stops)}
            assert params == VllmParams(**wanted, skip_clone=True)
            params.extra_args, params.max_tokens = {"other": 1}, 1
    scored = common | {"max_tokens": 1, "prompt_logprobs": 4}
    assert core._params_of(request(0, (), scored=2)) == VllmParams(**scored, skip_clone=True)
