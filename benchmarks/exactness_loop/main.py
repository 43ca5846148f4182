"""Whether the whole loop delivers what it promises: scheduler, generator and engine together.

    python -m benchmarks.exactness_loop [--quick] [--samples N] [--engine torch|vllm|sglang]
                                        [--modes "a;b"] [--seed S] [--json FILE]

`--engine torch,vllm,sglang` runs a mixed fleet: one generator on each engine. In the mode "verify,
run resumed" samples that one of them wrote ahead are verified and continued by another; they are
counted, and tested once more by themselves.

Two fixed sets of weights take turns as policy versions, so that the distribution of each step's
trajectories can be enumerated (`distributions`), while updates arrive in the middle of rollouts
(`harness`). The statements, each with a p-value (`statements`):

    texts        whole trajectories of the steps of one policy follow that policy
    lengths      so do the response lengths within each step, and their mean: no step favours short
                 answers
    tokens       each token, given the tokens before it, follows the policy of its version
    logprobs     recorded log-probabilities are the enumerated ones (greatest difference)

`verify` with k = 0 and learning rate 0 promise the first two, every mode the last two (`modes`).
Exits with status 1 if a p-value is below `ALARM`, or if a log-probability or a reward is wrong, or
if no token of a resumed mixed fleet was verified by another engine than drew it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.exactness_loop.engines import ENGINES, run
from benchmarks.exactness_loop.modes import (
    MODES,
    PROMPTS,
    ResponseDistributions,
    make_policies,
    settings_of,
)
from benchmarks.exactness_loop.statements import ALARM, TOLERANCE, check, rewards_match
from benchmarks.harness import names_of, parser_of, pick, report, table

QUICK, FULL = 5_000, 50_000
SMOKE_SAMPLES = 60
"""Of the first mode."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, f"{QUICK:,} samples for each mode")
    parser.add_argument("--samples", type=int, help=f"for each mode; default {FULL:,}")
    parser.add_argument("--engine", default="torch", help=f"one or more of {', '.join(ENGINES)}")
    parser.add_argument("--modes", help=f"some of: {'; '.join(MODES)} (separated by ;)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    samples = pick(options, options.samples or FULL, options.samples or QUICK, SMOKE_SAMPLES)
    names = names_of(parser, options.modes or ";".join(MODES), MODES, ";")
    kinds = names_of(parser, options.engine, ENGINES)
    if len(set(kinds)) < len(kinds):
        parser.error(f"--engine {options.engine}: each once")
    torch.set_num_threads(1)
    names = names[:1] if options.smoke else names
    raw = {name: _measure(name, kinds, samples, options.seed) for name in names}
    shown = table(
        f"whole loop, {options.engine}",
        "mode,statement,samples,cells,TV,by chance,p-value,verdict",
        (
            (
                name, what, one["samples"], one["cells"], one["tv"], one["tv_by_chance"],
                f"{one['p_value']:.2g}", "ok" if one["p_value"] >= ALARM else "WRONG",
            )
            for name, found in raw.items()
            for what, one in found["statements"].items()
        ),
        left=("statement",),
    )  # fmt: skip
    report(options, "exactness_loop", raw, {}, shown)
    return 0 if options.smoke or all(found["fine"] for found in raw.values()) else 1


def _measure(name: str, kinds: Sequence[str], samples: int, seed: int) -> dict[str, Any]:
    """Run one mode and test what it promises."""
    mode, began = MODES[name], time.perf_counter()
    policies = make_policies(mode.drift)
    outcome = asyncio.run(run(kinds, mode, settings_of(mode, samples, seed), policies))
    distributions = ResponseDistributions(policies, PROMPTS, mode.space)
    found = check(mode, outcome.delivered, distributions)
    verdicts, moved = dict(found.verdicts), outcome.moved
    if moved.delivered:
        again = check(mode, moved.delivered, distributions).verdicts
        verdicts |= {f"moved: {what}": verdict for what, verdict in again.items()}
    fine = (
        min(verdict.p_value for verdict in verdicts.values()) >= ALARM
        and found.worst_logprob <= max(TOLERANCE[kind] for kind in kinds)
        and found.staleness <= (0 if mode.whole else 1)
        and rewards_match(outcome.delivered)
        and (moved.accepted > 0 or len(kinds) == 1 or not mode.kill_run_every)
    )
    return {
        "statements": {what: vars(verdict) for what, verdict in verdicts.items()},
        "worst_logprob": found.worst_logprob,
        "staleness": found.staleness,
        "fine": fine,
        "verified": outcome.verified,
        "rejected": outcome.rejected,
        "cut": outcome.cut,
        "drafts_accepted": outcome.accepted,
        "delivered_by": Counter(one.generator for one in outcome.delivered),
        "runs": outcome.resumed + 1,
        "moved_samples": len(moved.delivered),
        "moved_samples_changed": moved.changed,
        "moved_tokens_accepted": moved.accepted,
        "seconds": time.perf_counter() - began,
    }
