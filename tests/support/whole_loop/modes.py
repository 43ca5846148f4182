"""The modes of the scheduler that are run, what each promises, and the policies' distributions.

Everything that can be said about a trajectory of a tiny policy is enumerated with plain Hugging
Face forward passes in float32 (softmax in float64): the distribution of whole responses to each
prompt, and of each token given the tokens before it, also for responses during which the weights
changed and whose earlier tokens left the KV of the old weights behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.scheduler.config import SchedulerConfig
from benchmarks.tiny_models import random_qwen3
from whole_loop.outcome import LoopSettings

Text = tuple[int, ...]
"""Response tokens."""
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class ResponseSpace:
    max_tokens: int
    stop: int
    """The stop token."""
    vocabulary: int
    """Number of token ids."""
    strings: StopRule | None = None
    """Ends a response as well."""

    def ends(self, text: Text) -> bool:
        """Whether a text is a whole response."""
        stopped = self.strings is not None and (
            self.strings.follow(self.strings.start, np.array(text, np.int64))[0] is not None
        )
        return stopped or text[-1:] == (self.stop,) or len(text) == self.max_tokens


class ResponseDistributions:
    """Distributions of two policies that take turns, for some prompts. Tables are computed once."""

    def __init__(
        self, policies: Sequence[Any], prompts: Sequence[Sequence[int]], space: ResponseSpace
    ) -> None:
        self.policies = policies
        self.prompts = [list(map(int, prompt)) for prompt in prompts]
        self.space = space
        self._next_token: dict[tuple[int, int], dict[Text, Doubles]] = {}
        self._on_old_kv: dict[tuple[int, int, int], dict[Text, Doubles]] = {}
        self._responses: dict[tuple[int, int], dict[Text, float]] = {}

    def next_token(self, policy: int, prompt: int) -> dict[Text, Doubles]:
        """`[V]` distribution of the next token after each unfinished text."""
        key = (policy, prompt)
        if key not in self._next_token:
            self._next_token[key] = self._table(policy, prompt)
        return self._next_token[key]

    def next_token_on_old_kv(self, old: int, prompt: int, swap: int) -> dict[Text, Doubles]:
        """The same for the other policy, after weights were swapped and `old` drew `swap` tokens.

        A token's KV is computed by the step that draws the next token. So the KV of the prompt and
        of all of these tokens but the last is the old policy's.
        """
        key = (old, prompt, swap)
        if key not in self._on_old_kv:
            self._on_old_kv[key] = self._table(1 - old, prompt, before=(old, swap))
        return self._on_old_kv[key]

    def responses(self, policy: int, prompt: int) -> dict[Text, float]:
        key = (policy, prompt)
        if key not in self._responses:
            self._responses[key] = self._enumerate(policy, prompt)
        return self._responses[key]

    def _enumerate(self, policy: int, prompt: int) -> dict[Text, float]:
        finished: dict[Text, float] = {}
        mass: dict[Text, float] = {(): 1.0}
        for text, row in self.next_token(policy, prompt).items():  # shorter texts come first
            for token in np.flatnonzero(row):
                longer = (*text, int(token))
                (finished if self.space.ends(longer) else mass)[longer] = mass.get(
                    text, 0.0
                ) * float(row[token])
        assert abs(sum(finished.values()) - 1) < 1e-9
        return finished

    def policy_distance(self, prompt: int) -> float:
        """Mean total variation between the policies at a token of the first one's responses."""
        mine, other = self.next_token(0, prompt), self.next_token(1, prompt)
        mass: dict[Text, float] = {(): 1.0}
        for text, row in mine.items():
            for token in np.flatnonzero(row):
                if not self.space.ends((*text, int(token))):
                    mass[(*text, int(token))] = mass.get(text, 0.0) * float(row[token])
        total = sum(
            mass.get(t, 0.0) * 0.5 * float(np.abs(row - other[t]).sum()) for t, row in mine.items()
        )
        return total / sum(mass.get(t, 0.0) for t in mine)

    @cached_property
    def _unfinished(self) -> list[tuple[list[Text], list[int]]]:
        """By length, the unfinished texts, each with the place of the one that it continues."""
        levels: list[tuple[list[Text], list[int]]] = [([()], [0])]
        for _ in range(self.space.max_tokens - 1):
            longer = [
                ((*text, token), place)
                for place, text in enumerate(levels[-1][0])
                for token in range(self.space.vocabulary)
                if not self.space.ends((*text, token))
            ]
            levels.append(([text for text, _ in longer], [place for _, place in longer]))
        return levels

    @torch.no_grad()
    def _table(
        self, policy: int, prompt: int, before: tuple[int, int] | None = None
    ) -> dict[Text, Doubles]:
        """Distributions after unfinished texts; longer ones continue on the KV of shorter ones.

        Args:
            policy: whose they are.
            prompt: its index.
            before: an old policy, and how many tokens it drew. The KV of the prompt and of all of
                these tokens but the last is its; the texts have so many tokens or more.
        """
        from transformers import DynamicCache

        old, swap = before or (policy, 0)
        model, known, cache = self.policies[policy], 0, DynamicCache()
        new = torch.tensor([[*self.prompts[prompt], *text] for text in self._unfinished[swap][0]])
        if before:
            known = new.shape[1] - 1
            self.policies[old](new[:, :known], past_key_values=cache, use_cache=True)
        new, table = new[:, known:], dict[Text, Doubles]()
        for texts, places in self._unfinished[swap:]:
            if len(texts[0]) > swap:
                cache.batch_select_indices(torch.tensor(places))
                new = torch.tensor([text[-1:] for text in texts])
            logits = model(new, past_key_values=cache, use_cache=True).logits[:, -1].double()
            table |= zip(texts, np.asarray(logits.softmax(-1).numpy()), strict=True)
        return table


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
    depth_by_tokens: bool = False
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
    "verify, auto": Mode(_ON_POLICY | {"max_runahead_groups": 27}, depth_by_tokens=True),
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
        depth_by_tokens=mode.depth_by_tokens,
        seed=seed,
    )
