"""Findings end the run or are said, and the weights that generators start with are compared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_processes import weights
from running_training import G, Run
from step_records import full_step

from asyncrl.controller import policy_watch
from asyncrl.controller.policy_mismatches import Findings
from asyncrl.controller.policy_watch import PolicyWatch
from asyncrl.errors import WrongPolicyError
from asyncrl.monitoring.metrics.metrics import ControllerMetrics, new_registry
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages.data import encode_floats, encode_tokens
from asyncrl.wire.records.wrong_policy import WrongPolicy
from asyncrl.wire.weights.layout import Fingerprint, TensorDigest, WeightManifest

OURS = Fingerprint({"w": TensorDigest("float32", "1", "1")}, "")
OTHER = Fingerprint({"w": TensorDigest("float32", "2", "2")}, "")
WRONG = WrongPolicy("temperature", G, 4, "it samples at another temperature")


def published(version: int) -> WeightManifest:
    return msgspec.structs.replace(weights(version), fingerprint=OURS)


def watch_of(run: Run, action: Any) -> PolicyWatch:
    return PolicyWatch(action, run.fleet, run.progress, run.waiter)


def test_a_finding_ends_the_run_unless_it_is_to_warn(tmp_path: Path) -> None:
    async def play() -> None:
        run = Run(tmp_path)
        await run.hear(G, fg.WrongPolicyFound(G, WRONG))
        assert ("found", (WRONG,)) in run.progress.calls
        with pytest.raises(WrongPolicyError, match=r"another temperature\. The run ends before"):
            await run.waiter.next_change()
        warned = Run(tmp_path / "2")
        watch_of(warned, "warn").found(WRONG)
        assert ("found", (WRONG,)) in warned.progress.calls
        warned.waiter.notify()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(warned.waiter.next_change(), 0.01)

    asyncio.run(play())
    assert WrongPolicyError("").exit_code == 1


@pytest.mark.parametrize("trainer_first", [False, True])
@pytest.mark.parametrize(
    ("found", "version", "named"),
    [
        (OURS, 0, ""),
        (OTHER, 0, "all 1 tensors differ"),
        (OTHER, 5, ""),  # a resumed trainer: these weights are replaced before they are used
        (Fingerprint({}, ""), 0, "cannot be compared with the trainer's: w."),
    ],
)
def test_first_weights_are_compared_when_both_are_ready(
    tmp_path: Path, *, trainer_first: bool, found: Fingerprint, version: int, named: str
) -> None:
    run = Run(tmp_path)
    watch = watch_of(run, "warn")
    (generator,) = run.fleet.generators()
    run.fleet.trainer.weights = published(version) if trainer_first else None
    watch.generator_ready(generator, found)
    if not trainer_first:
        assert not run.progress.calls
        run.fleet.trainer.weights = published(version)
        watch.compare()
    said = [*run.progress.said, *(call[1][0].text for call in run.progress.calls)]
    assert len(said) == bool(named)
    assert all(named in text for text in said)
    watch.compare()
    assert len(run.progress.calls) + len(run.progress.said) == len(said), "each is compared once"


def test_a_trainer_that_becomes_ready_is_compared_with_waiting_generators(tmp_path: Path) -> None:
    async def play() -> None:
        run = Run(tmp_path)
        (generator,) = run.fleet.generators()
        generator.policy_version = 0
        run.fleet.trainer.weights = None
        await run.hear(G, fg.GeneratorReady(G, 3, 0, OTHER))
        assert not [call for call in run.progress.calls if call[0] == "found"]
        await run.hear("trainer", ft.TrainerReady(0, published(0)))
        (found,) = [call[1][0] for call in run.progress.calls if call[0] == "found"]
        assert found.generator == G

    asyncio.run(play())


def suspicion() -> ft.WrongPolicyFound:
    tokens = encode_tokens(np.array([1, 2], np.int32))
    ours, theirs = (encode_floats(np.array([x, x], np.float32)) for x in (-1.0, -2.0))
    sample = ft.SuspectSample(tokens, tokens, recorded=theirs, expected=ours)
    wrong = msgspec.structs.replace(WRONG, cause="unknown")
    return ft.WrongPolicyFound(wrong, limit=1e-3, samples=(sample,))


def test_a_generator_scores_again_what_the_trainer_cannot_explain(tmp_path: Path) -> None:
    async def play() -> None:
        run = Run(tmp_path)
        message = suspicion()
        ((name, question),) = await run.hear("trainer", message)
        assert name == G
        assert question == tg.Rescore(
            1, (tg.ToRescore(message.samples[0].prompt_tokens, message.samples[0].tokens),)
        )
        assert not run.progress.calls
        answer = fg.Rescored(G, 1, 4, (message.samples[0].expected,))
        await run.hear(G, fg.Rescored(G, 2, 4))  # to no question
        await run.hear(G, answer)
        await run.hear(G, answer)
        (found,) = [call[1][0] for call in run.progress.calls]
        assert found.cause == "kv"

    asyncio.run(play())


@pytest.mark.parametrize("explained", [True, False])
def test_a_provisional_finding_ends_the_run_only_if_its_cause_is_found(
    tmp_path: Path, *, explained: bool
) -> None:
    async def play() -> None:
        run = Run(tmp_path)
        watch = watch_of(run, "stop")
        message = msgspec.structs.replace(suspicion(), provisional=True)
        await watch.suspected(message)
        sample = message.samples[0]
        again = sample.expected if explained else sample.recorded
        watch.rescored(G, fg.Rescored(G, 1, 4, (again,)))
        (found,) = [call[1][0] for call in run.progress.calls if call[0] == "found"]
        assert found.cause == ("kv" if explained else "unknown")
        run.waiter.notify()
        if explained:
            with pytest.raises(
                WrongPolicyError, match=r"may have been trained on from step 4 on"
            ) as end:
                await run.waiter.next_change()
            assert "before it trains" not in str(end.value)
            assert "at most 4 steps (--resume-from)" in str(end.value)
            return
        assert "the run continues: its first steps on GPUs only warn" in run.progress.said[-1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.waiter.next_change(), 0.01)

    asyncio.run(play())


def test_only_the_generator_that_was_asked_answers(tmp_path: Path) -> None:
    async def play() -> None:
        run = Run(tmp_path)
        watch, message = watch_of(run, "warn"), suspicion()
        await watch.suspected(message)
        answer = fg.Rescored(G, 1, 4, (message.samples[0].expected,))
        watch.rescored("generator-9", answer)
        assert not run.progress.calls
        watch.rescored(G, answer)
        assert len(run.progress.calls) == 1

    asyncio.run(play())


def test_a_generator_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_watch, "RESCORE_SECONDS", 0.01)

    async def play() -> None:
        run = Run(tmp_path)
        await run.hear("trainer", suspicion())
        with pytest.raises(WrongPolicyError, match="it did not answer within 0 s"):
            await asyncio.wait_for(run.waiter.next_change(), 60)
        run.hub.take()
        run.fleet.generators()[0].is_gone = True
        assert await run.hear("trainer", suspicion()) == []

    asyncio.run(play())


def test_findings_are_said_once_counted_and_recorded_with_their_step() -> None:
    registry = new_registry()
    metrics = ControllerMetrics.register(registry, "controller")
    said: list[str] = []
    earlier = [msgspec.structs.replace(full_step(), wrong_policy=("before the resume",))]
    findings = Findings(earlier, said.append, metrics)
    assert findings.all == ("before the resume",)
    assert findings.of_step() == ()
    findings.add(WRONG)
    findings.add(msgspec.structs.replace(WRONG, policy_version=5, text="again"))
    assert said == ["WRONG POLICY: it samples at another temperature"]
    assert findings.of_step() == ("it samples at another temperature", "again")
    assert findings.of_step() == ()
    sample = registry.get_sample_value(
        "asyncrl_wrong_policy_total", {"process": "controller", "cause": "temperature"}
    )
    assert sample == 2
    findings.rewind(earlier)
    assert findings.all == ("before the resume",)


def test_what_is_kept_of_findings_is_bounded() -> None:
    """With `warn`, 1,000 generators may each be found at every version."""
    findings = Findings([], lambda _: None, ControllerMetrics.register(new_registry(), "c"))
    for step in range(30):
        for number in range(50):
            wrong = msgspec.structs.replace(
                WRONG, generator=f"g{number}", text=f"{step}.{number}", policy_version=step
            )
            findings.add(wrong)
        recorded = findings.of_step()
        assert recorded[:2] == (f"{step}.0", f"{step}.1")
        assert len(recorded) < 50
        shown = len(recorded) - 1
        assert recorded[-1] == f"and {50 - shown} more findings"
    assert len(findings.all) < 500
    assert findings.all[-1] == f"and {30 * 50 - len(findings.all) + 1} more findings"
