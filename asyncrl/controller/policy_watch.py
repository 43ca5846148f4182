"""Reacts when a process samples from another policy than the one being trained.

generators, trainer ── WrongPolicyFound ─► PolicyWatch ─► printed, counted, recorded
                                                └─ run.on_wrong_policy: stop ─► the run ends
             generator ◄─ Rescore, Rescored ─► if the trainer does not know the cause
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from asyncrl.config.run_section import OnWrongPolicy
from asyncrl.controller.progress import Progress
from asyncrl.errors import WrongPolicyError
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker
from asyncrl.rollout.trajectory import BoolArray, FloatArray
from asyncrl.wire.messages.data import decode_floats, decode_tokens
from asyncrl.wire.messages.from_generator import Rescored
from asyncrl.wire.messages.from_trainer import SuspectSample, WrongPolicyFound
from asyncrl.wire.messages.to_generator import Rescore, ToRescore
from asyncrl.wire.records.wrong_policy import (
    Cause,
    WrongPolicy,
    compare_weights,
    listed,
    not_compared,
)
from asyncrl.wire.weights.layout import ADAPTER_ENDINGS, Fingerprint

RESCORE_SECONDS = 30.0


def conclusion(asked: WrongPolicyFound, answer: Rescored) -> WrongPolicy:
    """Add the cause to a finding, if the generator's answer shows it.

    The engine has scored the samples without any cached KV. If it agrees with the trainer now, the
    tokens were drawn on other KV: that of older weights. If it agrees with its own record, it
    computes another policy than the trainer from the same weights, tokens and temperature.
    """
    cause, text = _explain(asked, answer)
    return msgspec.structs.replace(asked.found, cause=cause, text=f"{asked.found.text}; {text}")


def _explain(asked: WrongPolicyFound, answer: Rescored) -> tuple[Cause, str]:
    name, version = asked.found.generator, answer.policy_version
    lengths = [len(sample.tokens) for sample in asked.samples]
    if [len(one) for one in answer.logprobs] != lengths:
        why = answer.reason or "its answer has other lengths"
        return "unknown", f"{name} could not score them again: {why}"
    if version != asked.found.policy_version:
        return "unknown", f"{name} has version {version} by now and cannot score them again"
    drawn = np.concatenate([_drawn(sample) for sample in asked.samples])
    again = _joined(answer.logprobs)[drawn]
    from_trainer = _mean_gap(again, _joined(one.expected for one in asked.samples)[drawn])
    from_itself = _mean_gap(again, _joined(one.recorded for one in asked.samples)[drawn])
    if from_trainer <= asked.limit:
        return "kv", (
            "scored again without cached KV, the same tokens agree with the trainer within "
            f"{from_trainer:.2g}: they were drawn on KV that other weights had computed"
        )
    if from_itself <= asked.limit:
        return "unknown", (
            "scored again without cached KV, they agree with what was recorded within "
            f"{from_itself:.2g}: the engine computes another policy from the same weights (its "
            "positions, its attention or its head)"
        )
    return "unknown", (
        f"scored again without cached KV, they agree neither with the trainer ({from_trainer:.2g}) "
        f"nor with what was recorded ({from_itself:.2g})"
    )


def _drawn(sample: SuspectSample) -> BoolArray:
    """`[L]` True for tokens that a policy drew."""
    observed = sample.observed or bytes(len(decode_tokens(sample.tokens)))
    drawn: BoolArray = np.frombuffer(observed, np.uint8) == 0
    return drawn


def _joined(arrays: Iterable[bytes]) -> FloatArray:
    return np.concatenate([decode_floats(one) for one in arrays])


def _mean_gap(one: FloatArray, other: FloatArray) -> float:
    gap = np.abs(one.astype(np.float64) - other)
    return float(np.minimum(np.nan_to_num(gap, nan=1.0, posinf=1.0), 1.0).mean())


@dataclass(eq=False)
class PolicyWatch:
    """Takes findings of all processes, and compares the weights that generators start with."""

    _action: OnWrongPolicy
    _fleet: Fleet
    _progress: Progress
    _waiter: ConditionWait
    _asked: dict[int, WrongPolicyFound] = field(default_factory=dict, init=False)
    """Findings whose tokens are being rescored, by request number."""
    _questions: int = field(default=0, init=False)
    _at_start: list[tuple[GeneratorWorker, Fingerprint]] = field(default_factory=list, init=False)

    def found(self, what: WrongPolicy, *, provisional: bool = False, trained: bool = False) -> None:
        """Record a finding; end the run if configured, unless the finding is provisional.

        A provisional finding may be rounding; a `trained` one was, while the step continued.
        """
        self._progress.found(what)
        if self._action == "stop" and provisional:
            self._progress.say(
                "the run continues: its first steps on GPUs only warn about differences that "
                "rounding may explain; if they last, the run ends (run.on_wrong_policy: stop)"
            )
        elif self._action == "stop":
            self._waiter.fail(
                WrongPolicyError(
                    f"{what.text}. {_end(what.policy_version, trained=trained)}; "
                    "docs/operate.md#wrong-policy says what each cause means"
                )
            )

    async def suspected(self, message: WrongPolicyFound) -> None:
        """Take a finding of the trainer; if its cause is unknown, ask the generator first."""
        generators = {worker.name for worker in self._fleet.generators()}
        if not message.samples or message.found.generator not in generators:
            self.found(message.found, provisional=message.provisional)
            return
        self._questions += 1
        number = self._questions
        self._asked[number] = message
        samples = tuple(ToRescore(one.prompt_tokens, one.tokens) for one in message.samples)
        await self._fleet.send(message.found.generator, Rescore(number, samples))
        asyncio.get_running_loop().call_later(RESCORE_SECONDS, self._give_up, number)

    def rescored(self, generator: str, answer: Rescored) -> None:
        """Take a generator's rescored tokens, unless they are late or match no request to it."""
        asked = self._asked.get(answer.number)
        if asked is not None and asked.found.generator == generator:
            del self._asked[answer.number]
            wrong = conclusion(asked, answer)
            is_known = wrong.cause != "unknown"
            provisional = asked.provisional and not is_known
            self.found(wrong, provisional=provisional, trained=asked.provisional and is_known)

    def _give_up(self, number: int) -> None:
        if number in self._asked:
            generator = self._asked[number].found.generator
            reason = f"it did not answer within {RESCORE_SECONDS:.0f} s"
            self.rescored(generator, Rescored(generator, number, -1, reason=reason))

    def generator_ready(self, worker: GeneratorWorker, fingerprint: Fingerprint) -> None:
        """Compare the generator's initial weights, now or when a trainer is ready."""
        self._at_start.append((worker, fingerprint))
        self.compare()

    def compare(self) -> None:
        """Compare pending weights with the trainer's newest, if it is ready."""
        weights = self._fleet.weights
        if weights is None or weights.fingerprint is None:
            return
        expected, version = weights.fingerprint, weights.policy_version
        waiting, self._at_start = self._at_start, []
        for worker, fingerprint in waiting:
            # An adapter that is served apart comes, and is compared, with its first installation:
            # before it B is 0, and the policy is the model's own.
            names = not_compared(expected, fingerprint)
            missing = [name for name in names if not name.endswith(ADAPTER_ENDINGS)]
            if missing:
                self._progress.say(
                    f"WARNING: {len(missing)} of {len(expected.tensors)} tensors of {worker.name} "
                    f"cannot be compared with the trainer's: {listed(missing)}. Their names, their "
                    "data types or their layout in the engine differ, so a fault in them would "
                    "only show in the log-probabilities"
                )
            if worker.policy_version == version and not worker.is_gone:
                wrong = compare_weights(worker.name, version, expected=expected, found=fingerprint)
                if wrong is not None:
                    self.found(wrong)


def _end(step: int, *, trained: bool) -> str:
    """Describe the end of the run before or after such tokens were trained on.

    `step` has these tokens; the trainer may have taken it, if `trained`.
    """
    if not trained:
        return "The run ends before it trains on such tokens (run.on_wrong_policy: stop)"
    way = f"resume from a checkpoint of at most {step} steps (--resume-from), or " if step else ""
    return (
        "The run ends (run.on_wrong_policy: stop), but such tokens may have been trained on from "
        f"step {step} on: the cause was not known at once, and the first steps on GPUs only warn. "
        f"To train without them, {way}start again with --clean"
    )
