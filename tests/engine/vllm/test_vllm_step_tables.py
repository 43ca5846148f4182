"""The table of a step between vLLM's scheduler and our output processor, with vLLM's own types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice
from served_vllm import REAL_VLLM

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.remote.client.responses import Response, Responses
from asyncrl.engine.remote.extras import StepTable
from asyncrl.engine.vllm.remote import CoreSettings

pytestmark = REAL_VLLM

NAMES = [f"r{i}" for i in range(5)]
TICKETS = {name: 11 + row for row, name in enumerate(NAMES)}


def outputs_of(counts: dict[str, int], ended: tuple[str, ...] = ()) -> list[Any]:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    return [
        EngineCoreOutput(
            name, list(range(n)), finish_reason=FinishReason.LENGTH if name in ended else None
        )
        for name, n in counts.items()
    ]


def step_of(counts: list[int] | None = None) -> tuple[Any, dict[str, int]]:
    """A step of five rows; with drafts, they get so many tokens each."""
    from vllm.v1.outputs import LogprobsLists

    each = counts or [1] * 5
    ids = np.arange(3 * sum(each), dtype=np.int32).reshape(-1, 3)
    tickets = np.repeat(np.array(list(TICKETS.values()), np.int64), each)
    tickets.setflags(write=False)  # the worker has it, too
    begins = None if counts is None else [0, *np.cumsum(counts).tolist()]
    lists = LogprobsLists(ids, -ids.astype(np.float32), tickets, begins)
    return lists, {name: row for row, name in enumerate(NAMES)}


def carried(outputs: list[Any]) -> list[Any]:
    """Through vLLM's own encoding, as between its processes."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    return list(MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs)


def sent(step: tuple[Any, dict[str, int]], outputs: list[Any]) -> list[Any]:
    from asyncrl.engine.vllm.worker.scheduler import outputs_of

    return carried(outputs_of(*step, outputs))


def tickets_of(step: tuple[Any, dict[str, int]], outputs: list[Any]) -> list[int]:
    return StepTable(*sent(step, outputs)[0].new_logprobs[:3]).tickets.tolist()


def test_a_step_in_which_nothing_ends_is_sent_as_one_output() -> None:
    lists, row_of = step_of()
    (only,) = sent((lists, row_of), outputs_of(dict.fromkeys(NAMES, 1)))
    table = StepTable(*only.new_logprobs[:3])
    assert only.new_token_ids == []
    assert table.tickets.tolist() == [11, 12, 13, 14, 15]
    np.testing.assert_array_equal(table.ids, lists.logprob_token_ids)
    np.testing.assert_array_equal(table.logprobs, lists.logprobs)


def test_what_ends_a_request_is_sent_and_the_first_of_it_has_the_table() -> None:
    got = sent(step_of(), outputs_of(dict.fromkeys(NAMES, 1), ended=("r3", "r1")))
    assert [one.request_id for one in got] == ["r1", "r3"]
    assert [one.new_logprobs is None for one in got] == [False, True]
    assert [one.new_token_ids for one in got] == [[], []]


@pytest.mark.parametrize("counts", [None, [1, 2, 1, 1, 3]])
def test_tokens_that_vllm_discards_are_nobodys(counts: list[int] | None) -> None:
    """Of unfinished prompts and aborted requests; an error of another request is no output."""
    step = step_of(counts)
    left = {"r3": 1, "r0": 1, "r4": 3 if counts else 1}
    expected = [11, 0, 0, 0, 14, 15, 15, 15] if counts else [11, 0, 0, 14, 15]
    assert tickets_of(step, outputs_of(left)) == expected
    others = left | {"elsewhere": 0, "r2": 0}  # as many outputs as there are rows
    assert tickets_of(step, outputs_of(others, ended=("elsewhere", "r2"))) == expected


def test_accepted_drafts_after_the_end_are_nobodys() -> None:
    """VLLM cuts them off; the table still has them."""
    step = step_of([3, 1, 1, 2, 1])
    counts = dict(zip(NAMES, [3, 1, 1, 1, 1], strict=True))
    got = tickets_of(step, outputs_of(counts, ended=("r0", "r3")))
    assert got == [11, 11, 11, 12, 13, 14, 0, 15]


def processor_with(names: list[str]) -> tuple[Any, dict[str, Response]]:
    from asyncrl.engine.vllm.client.launch import StepProcessor

    responses = Responses(chunk_tokens=100)
    processor = StepProcessor(responses)
    return processor, {name: open_at(processor, name) for name in names}


def open_at(processor: Any, name: str) -> Response:
    request = GenerateRequest(
        name, "", np.array([1], np.int32), SamplingParams(9, top_k_logprobs=2)
    )
    response = Response(request, 7, processor.responses)
    processor.request_states[name] = SimpleNamespace(
        queue=response, request_id=name, external_req_id=name, parent_req=None
    )
    processor.external_req_ids[name].append(name)
    return response


def step_for(responses: dict[str, Response], counts: list[int] | None = None) -> Any:
    lists, row_of = step_of(counts)
    tickets = [responses[name].ticket if name in responses else 0 for name in NAMES]
    each = np.repeat(np.array(tickets, np.int64), counts or [1] * 5)
    return lists._replace(sampled_token_ranks=each), row_of


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("counts", [None, [1, 2, 1, 1, 3]])
def test_a_message_may_be_processed_in_parts(at_once: int, counts: list[int] | None) -> None:
    """VLLM splits long ones. All these requests end, so each has an output."""
    processor, inboxes = processor_with(NAMES)
    each = dict(zip(NAMES, counts or [1] * 5, strict=True))
    given = outputs_of({name: each[name] for name in NAMES[::-1]}, ended=tuple(NAMES))
    outputs = sent(step_for(inboxes, counts), given)
    for start in range(0, 5, at_once):
        processor.process_outputs(outputs[start : start + at_once], weight_version="7")
    begin = 0
    for name in NAMES:
        chunks = list(inboxes[name]._items)
        places = [3 * (begin + i) for i in range(each[name])]
        begin += each[name]
        assert {chunk.policy_version for chunk in chunks} == {7}
        assert [token for chunk in chunks for token in chunk.tokens] == places
        lists = [ids for chunk in chunks for ids in chunk.topk_ids.tolist()]
        assert lists == [[place + 1, place + 2] for place in places]
        assert chunks[-1].finish_reason == "length"
        assert inboxes[name].closed


def test_tokens_without_a_table_are_an_error_and_not_lost() -> None:
    processor, _ = processor_with(["r0"])
    with pytest.raises(EngineError, match="without the table"):
        processor.process_outputs(outputs_of({"r0": 1}), weight_version="0")


def test_a_request_may_end_without_any_token() -> None:
    processor, inboxes = processor_with(["r0"])
    processor.process_outputs(outputs_of({"r0": 0}, ended=("r0",)), weight_version="3")
    (chunk,) = inboxes["r0"]._items
    assert (len(chunk.tokens), chunk.finish_reason) == (0, "length")


def test_a_request_that_was_aborted_meanwhile_is_left_out() -> None:
    """Its row is given to another request, while the core still sends its tokens."""
    processor, inboxes = processor_with(["r0", "r1"])

    def step(*running: str) -> None:
        outputs = outputs_of(dict.fromkeys(running, 1))
        processor.process_outputs(sent(step_for(inboxes), outputs), weight_version="0")

    step("r0", "r1")
    gone = processor.request_states.pop("r0").queue
    gone.put(None)
    inboxes["r2"] = open_at(processor, "r2")
    step("r0", "r1")
    step("r2", "r0", "r1")
    processor.responses.flush()
    got = [[c.tokens.tolist() for c in one._items] for one in (gone, inboxes["r1"], inboxes["r2"])]
    assert got == [[[0]], [[3], [3, 3]], [[6]]]


def test_the_scheduler_is_the_one_that_vllm_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from asyncrl.engine.vllm.worker import scheduler

    monkeypatch.setattr(Scheduler, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda *_, **__: None)
    made = [
        scheduler.make_scheduler(
            SimpleNamespace(
                scheduler_config=SimpleNamespace(async_scheduling=flag),
                additional_config=CoreSettings(1).to_config(),
            ),
            log_stats=True,
        )
        for flag in (False, True)
    ]
    assert [isinstance(one, AsyncScheduler) for one in made] == [False, True]
    assert all(isinstance(one, Scheduler) for one in made)
    lists, row_of = step_of()
    for one, base in zip(made, (Scheduler, AsyncScheduler), strict=True):
        message = SimpleNamespace(outputs=outputs_of({"r1": 1, "r0": 1}))
        monkeypatch.setattr(base, "update_from_output", lambda *_, m=message: {0: m})
        one.finished_req_ids = set()
        result = SimpleNamespace(logprobs=lists, req_id_to_index=row_of, prompt_logprobs_dict={})
        (got,) = one.update_from_output(None, result).values()
        (only,) = got.outputs
        assert only.new_logprobs.sampled_token_ranks.tolist() == [11, 12, 0, 0, 0]
        monkeypatch.undo()
        monkeypatch.setattr(Scheduler, "__init__", lambda *_, **__: None)


def test_tickets_that_stay_on_the_host_come_with_the_table() -> None:
    """By all ways that vLLM brings a table from a GPU to the host."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    ids = torch.arange(12, dtype=torch.int32).view(4, 3)
    with FakeDevice() as device:
        there = torch.device("cuda", 0)
        sampled = torch.tensor([[1, -1], [2, 3]], device=there)
        tickets = torch.tensor([11, 11, 12, 12])
        table = LogprobsTensors(ids.to(there), -ids.float().to(there), tickets)
        device.waits.clear()
        copied = table.to_cpu_nonblocking()
        assert device.waits == {}
        for one in (table, copied):
            assert one.tolists().sampled_token_ranks.tolist() == [11, 11, 12, 12]
        _, accepted = RejectionSampler.parse_output(sampled, 9, (), copied)
    assert accepted is not None
    assert accepted.sampled_token_ranks.tolist() == [11, 12, 12]
    assert accepted.logprob_token_ids.tolist() == ids[[0, 2, 3]].tolist()
