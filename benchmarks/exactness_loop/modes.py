"""The modes of the scheduler that are run, and what each promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.scheduler.config import SchedulerConfig
from benchmarks.exactness_loop.distributions import ResponseSpace
from benchmarks.exactness_loop.outcome import LoopSettings
from benchmarks.tiny_models import random_qwen3

SPACE = ResponseSpace(max_tokens=8, stop=2, vocabulary=4)
STRINGS = replace(SPACE, strings=StopRule.of(["abbabb", "bbbb"], [b"ab", b"b", b"", b"a"]))
"""With stop strings that three to six tokens complete."""
PROMPTS = ((1, 0, 1), (1, 1), (0, 0, 0, 1))
_SEED = 18
DRIFT = 0.2
"""Total variation of 0.13 to 0.15 at a token."""


@dataclass(frozen=True)
class Mode:
    """One way to run the loop, and what it promises."""

    scheduler: dict[str, Any]
    drift: float = DRIFT
    """How far the two policies are apart; 0: all versions have the same weights."""
    whole: bool = True
    """Whether whole trajectories follow the policy that trains on them, at staleness 0."""
    slots: int = 64
    remote_slots: int = 64
    """How many of them are used if they are all of vLLM or SGLang, whose steps take less time here
    than staging weights does."""
    top_k: int = 3
    max_draft_tokens: int = 2
    kv_rebuilt: bool = False
    """Whether tokens after an update are drawn on KV of the new weights only."""
    publish_delays: tuple[int, ...] = (0, 1, 2, 3)
    install_delay: int = 0
    """See `LoopSettings`."""
    lose_trainer_every: int = 0
    """See `LoopSettings`."""
    kill_run_every: int = 0
    """See `LoopSettings`."""
    leave_every: int = 0
    """See `LoopSettings`."""
    generators: int = 1
    """On torch engines, if no other engine is asked for."""
    turns_per_step: int = 4
    """Turns of the event loop that a step of the torch engine takes; see `engines.slow_down`."""
    space: ResponseSpace = SPACE


_ON_POLICY: dict[str, Any] = {"group_size": 16, "groups_per_step": 9}
_ONE_STEP_OFF = _ON_POLICY | {"max_off_policy_steps": 1}
MODES: dict[str, Mode] = {
    "verify, 1 ahead": Mode(_ON_POLICY | {"max_runahead_groups": 9}),
    # Policies so far apart that few samples show what is wrong.
    "verify, far apart": Mode(_ON_POLICY | {"max_runahead_groups": 9}, drift=1.0),
    "verify, 3 ahead": Mode(_ON_POLICY | {"max_runahead_groups": 27}),
    # Slower steps, so that some groups are partly verified by a policy that is gone.
    "verify, trainers lost": Mode(
        _ON_POLICY | {"max_runahead_groups": 18}, lose_trainer_every=2, turns_per_step=8
    ),
    "verify, run resumed": Mode(
        _ON_POLICY | {"max_runahead_groups": 18}, drift=1.0, kill_run_every=2, turns_per_step=8
    ),
    "verify, generators leave": Mode(
        _ON_POLICY | {"max_runahead_groups": 18},
        drift=1.0,
        leave_every=1,
        generators=2,
        turns_per_step=8,
    ),
    # Few slots, so that samples are in generation whenever new weights arrive.
    "verify, stop strings": Mode(
        _ON_POLICY | {"max_runahead_groups": 9},
        install_delay=2,
        slots=40,
        turns_per_step=8,
        space=STRINGS,
    ),
    "verify, no drafts": Mode(_ON_POLICY | {"max_runahead_groups": 9}, max_draft_tokens=0),
    "learning rate 0": Mode(
        _ON_POLICY | {"max_runahead_groups": 9},
        drift=0.0,
        top_k=SPACE.vocabulary,
        max_draft_tokens=0,
        install_delay=2,
        turns_per_step=8,
    ),
    "verify, k = 1": Mode(_ONE_STEP_OFF | {"max_runahead_groups": 9}, whole=False),
    # Few slots, so that there is work in generation when the staged weights are installed.
    "keep, k = 1": Mode(_ONE_STEP_OFF | {"on_update": "keep"}, whole=False, remote_slots=24),
    # Slower steps, so that enough samples are in generation when the staged weights are installed.
    "recompute, k = 1": Mode(
        _ONE_STEP_OFF | {"on_update": "recompute"},
        whole=False,
        remote_slots=24,
        kv_rebuilt=True,
        turns_per_step=8,
    ),
}


def make_policies(drift: float = DRIFT) -> list[Any]:
    """Two random Qwen3 models, the second one this far on the way to a third one."""
    one, other, two = (
        random_qwen3(seed, SPACE.vocabulary) for seed in (_SEED, 1000 + _SEED, _SEED)
    )
    with torch.no_grad():
        for mine, theirs in zip(two.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, drift)
    return [one, two]


def settings_of(mode: Mode, samples: int, seed: int) -> LoopSettings:
    """Settings with enough steps for this many samples, and at least 4."""
    config = SchedulerConfig(**mode.scheduler)
    steps = max(4, -(-samples // (config.group_size * config.groups_per_step)))
    return LoopSettings(
        config,
        steps,
        SamplingParams(
            mode.space.max_tokens,
            stop_tokens=(mode.space.stop,),
            stop_rule=mode.space.strings,
            top_k_logprobs=mode.top_k,
        ),
        publish_delays=mode.publish_delays,
        install_delay=mode.install_delay,
        lose_trainer_every=mode.lose_trainer_every,
        kill_run_every=mode.kill_run_every,
        leave_every=mode.leave_every,
        seed=seed,
    )
