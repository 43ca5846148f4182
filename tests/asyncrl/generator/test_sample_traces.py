"""What a generator does with a traced sample becomes spans, in order."""

from __future__ import annotations

import pytest
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle, verify

from asyncrl.generator.sample_traces import SampleTraces
from asyncrl.monitoring.tracing.tracer import TraceIds, Tracer, TraceSpan
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import data
from asyncrl.wire.messages import to_generator as tg


class Kept(list[TraceSpan]):
    """Spans in the order in which they ended."""

    put = list.append


def traced(rate: float = 1.0) -> tuple[Kept, SampleTraces]:
    kept = Kept()
    return kept, SampleTraces(Tracer(TraceIds("k", rate), kept, float))


def test_an_interrupted_sample_is_verified_rewarded_and_delivered() -> None:
    spans, traces = traced()

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=2))
        harness.engine.feed("train-5.1", [3], 1)
        harness.engine.unreported["train-5.1"] = ([4], 1)
        await settle()
        await harness.send(verify())
        harness.engine.feed("train-5.1-v2", [3, 9], 2, verified=1, end="stop")
        await settle()
        await harness.delivered()
        assert [span.name for span in spans] == ["generate", "verify", "reward"]
        harness.data.inbox.put_nowait(data.Received(SAMPLE, 0))
        await settle()

    play(scenario, traces=traces)
    generate, verification, reward, deliver = spans
    assert [name for name, *_ in generate.events] == ["first token", "interrupt"]
    assert generate.attributes == {
        "asyncrl.group": 5, "asyncrl.sample": 1, "asyncrl.prompt": "p", "asyncrl.priority": 2,
        "asyncrl.tokens.before": 0, "asyncrl.tokens": 2, "asyncrl.policy_version": 1,
        "asyncrl.finish_reason": "abort",
    }  # fmt: skip
    assert [name for name, *_ in verification.events] == ["first token"]
    about = verification.attributes
    assert (about["asyncrl.tokens.to_verify"], about["asyncrl.tokens.verified"]) == (2, 1)
    assert about["asyncrl.policy_version"] == 2
    assert reward.attributes["asyncrl.reward"] == 2.0
    assert deliver.name == "deliver"
    assert (deliver.attributes["asyncrl.step"], deliver.attributes["asyncrl.times_sent"]) == (2, 1)
    moments = [generate.start, generate.end, verification.start, verification.end]
    moments += [reward.start, reward.end, deliver.start, deliver.end]
    assert moments == sorted(moments)
    ids = TraceIds("k", 1.0)
    assert {span.trace for span in spans} == {ids.trace(5)}
    assert {span.parent for span in spans} == {ids.sample_span(5, 1)}


@pytest.mark.parametrize("group", range(4))
def test_only_samples_of_traced_groups_are_recorded(group: int) -> None:
    """An evaluation round has numbers of its own, which are no groups."""
    spans, traces = traced(0.5)
    sample = SampleId(group, 0)

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(sample, PROMPT, 7))
        harness.engine.feed(f"train-{sample}", [3], 1, end="stop")
        await harness.send(tg.Evaluate(0, 0, PROMPT, 7))
        harness.engine.feed("eval-0.0", [3], 1, end="stop")
        await settle()

    play(scenario, traces=traces)
    expected = ["generate", "reward"] if TraceIds("k", 0.5).is_traced(group) else []
    assert [span.name for span in spans] == expected
