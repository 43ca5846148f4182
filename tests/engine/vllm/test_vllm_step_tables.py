"""The table of a step between vLLM's scheduler and our output processor, with vLLM's own types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from served_vllm import REAL_VLLM

from engine.errors import EngineError
from engine.protocol import GenerateRequest, SamplingParams
from engine.vllm.client.responses import Response, Responses
from engine.vllm.extras import StepTable

pytestmark = REAL_VLLM

NAMES = [f"r{i}" for i in range(5)]


def outputs_of(counts: dict[str, int]) -> list[Any]:
    from vllm.v1.engine import EngineCoreOutput

    return [EngineCoreOutput(name, list(range(n))) for name, n in counts.items()]


def step_of(begins: list[int] | None, size: int) -> tuple[Any, dict[str, int]]:
    from vllm.v1.outputs import LogprobsLists

    ids = np.arange(3 * size, dtype=np.int32).reshape(size, 3)
    lists = LogprobsLists(ids, -ids.astype(np.float32), np.zeros(size, np.int32), begins)
    return lists, {name: row for row, name in enumerate(NAMES)}


def carried(outputs: list[Any]) -> list[Any]:
    """Through vLLM's own encoding, as between its processes."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    return list(MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs)


def sent(lists: Any, row_of: dict[str, int], outputs: list[Any]) -> list[Any]:
    from vllm.v1.outputs import LogprobsLists

    from engine.vllm.worker.scheduler import table_of

    outputs[0].new_logprobs = LogprobsLists(*table_of(lists, row_of, outputs))
    return carried(outputs)


def test_a_table_says_where_each_output_begins_also_in_another_order() -> None:
    lists, row_of = step_of(None, 5)
    first, *others = sent(lists, row_of, outputs_of({"r3": 1, "r0": 1, "unknown": 0}))
    table = StepTable(*first.new_logprobs)
    assert (table.starts.tolist(), table.counts) == ([3, 0, -1], None)
    assert all(other.new_logprobs is None for other in others)
    np.testing.assert_array_equal(table.ids, lists.logprob_token_ids)
    np.testing.assert_array_equal(table.logprobs, lists.logprobs)


def test_with_drafts_it_says_how_many_tokens_are_left_of_each_output() -> None:
    """vLLM cuts accepted drafts after a stop token; the table still has them."""
    lists, row_of = step_of([0, 3, 4, 4, 6, 7], 7)
    (first, _) = sent(lists, row_of, outputs_of({"r3": 1, "r0": 3}))
    table = StepTable(*first.new_logprobs)
    assert (table.starts.tolist(), table.counts) == ([4, 0], [1, 3])


def processor_with(names: list[str]) -> tuple[Any, dict[str, Response]]:
    from engine.vllm.client.outputs import StepProcessor

    responses = Responses(chunk_tokens=100)
    processor = StepProcessor(responses)
    inboxes = {}
    for name in names:
        request = GenerateRequest(
            name, "", np.array([1], np.int32), SamplingParams(9, top_k_logprobs=2)
        )
        inboxes[name] = Response(request, 7, responses)
        processor.request_states[name] = SimpleNamespace(queue=inboxes[name], request_id=name)
    return processor, inboxes


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("begins", [None, [0, 1, 3, 4, 5, 8]])
def test_a_message_may_be_processed_in_parts(at_once: int, begins: list[int] | None) -> None:
    processor, inboxes = processor_with(NAMES)
    counts = (
        dict.fromkeys(NAMES, 1)
        if begins is None
        else dict(zip(NAMES, np.diff(begins), strict=True))
    )
    lists, row_of = step_of(begins, 5 if begins is None else 8)
    outputs = sent(lists, row_of, outputs_of({name: int(counts[name]) for name in NAMES[::-1]}))
    for start in range(0, 5, at_once):
        processor.process_outputs(outputs[start : start + at_once], weight_version="7")
    for row, name in enumerate(NAMES):
        (chunk,) = inboxes[name]._items
        start = row if begins is None else begins[row]
        assert chunk.policy_version == 7
        assert chunk.tokens.tolist() == [3 * (start + i) for i in range(counts[name])]
        assert chunk.topk_ids.tolist() == [
            [3 * (start + i) + 1, 3 * (start + i) + 2] for i in range(counts[name])
        ]


def test_tokens_without_a_table_are_an_error_and_not_lost() -> None:
    processor, _ = processor_with(["r0"])
    with pytest.raises(EngineError, match="without the table"):
        processor.process_outputs(outputs_of({"r0": 1}), weight_version="0")


def test_a_request_that_was_aborted_meanwhile_is_left_out() -> None:
    """Its row is given to another request, while the core still sends its tokens."""
    processor, inboxes = processor_with(["r0", "r1"])
    lists, row_of = step_of(None, 5)
    processor.process_outputs(sent(lists, row_of, outputs_of({"r0": 1, "r1": 1})))
    gone = processor.request_states.pop("r0").queue
    gone.put(None)
    other, more = processor_with(["r2"])[1]["r2"], []
    more = [Response(other.request, 7, processor.responses)]
    processor.request_states["r2"] = SimpleNamespace(queue=more[0], request_id="r2")
    processor.process_outputs(sent(lists, row_of, outputs_of({"r0": 1, "r1": 1})))
    processor.process_outputs(sent(lists, row_of, outputs_of({"r2": 1, "r0": 1, "r1": 1})))
    processor.responses.flush()
    got = [[c.tokens.tolist() for c in one._items] for one in (gone, inboxes["r1"], more[0])]
    assert got == [[[0]], [[3], [3, 3]], [[6]]]


def test_the_scheduler_is_the_one_that_vllm_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine.vllm.worker import scheduler

    monkeypatch.setattr(Scheduler, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda *_, **__: None)
    made = [
        scheduler.make_scheduler(
            SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=flag)), log_stats=True
        )
        for flag in (False, True)
    ]
    assert [isinstance(one, AsyncScheduler) for one in made] == [False, True]
    assert all(isinstance(one, Scheduler) for one in made)
    lists, row_of = step_of(None, 5)
    for one, base in zip(made, (Scheduler, AsyncScheduler), strict=True):
        message = SimpleNamespace(outputs=outputs_of({"r1": 1, "r0": 1}))
        monkeypatch.setattr(base, "update_from_output", lambda *_, m=message: {0: m})
        result = SimpleNamespace(logprobs=lists, req_id_to_index=row_of)
        (got,) = one.update_from_output(None, result).values()
        assert got.outputs[0].new_logprobs.sampled_token_ranks.tolist() == [1, 0]
        monkeypatch.undo()
        monkeypatch.setattr(Scheduler, "__init__", lambda *_, **__: None)
