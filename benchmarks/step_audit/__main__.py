"""Recomputes the steps of real runs from what their folders say, by other code.

    python -m benchmarks.step_audit --quick --json FILE

Each run is an ordinary `asyncrl run` with the built-in model, whose samples and checkpoints are
kept. From these alone, each step is computed again in float64 by formulas and loops that share
nothing with `trainer`: which policy drew each token with what probability, advantages, corrections,
loss, gradient, clipping, AdamW, and every metric. Printed is the largest relative difference of any
step, by run and quantity. The exit code is 1 if one is above its tolerance.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

from asyncrl.tasks.config import ModelConfig
from asyncrl.tasks.model import resolve_model
from benchmarks.harness import parser_of, report, run_command, table
from benchmarks.step_audit.compare import differences
from benchmarks.step_audit.model import Folder, Model
from benchmarks.tiny_models import smoke_settings


class Case(NamedTuple):
    example: str
    """In `examples/`, without its ending."""
    settings: tuple[str, ...] = ()
    steps: int = 3
    resume_after: int | None = None
    """The run is ended after so many steps, and resumed."""


COMMON = (
    "run.log_samples=jsonl",
    "run.log_sample_tokens=true",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=1000",
    "evaluation.prompts=1",
    "monitoring.live=off",
    "scheduler.groups_per_step=4",
    "scheduler.group_size=4",
    "engine.slots=16",
)
_STALE = ("scheduler.on_update=recompute", "scheduler.max_off_policy_steps=1")
_LOOSE = ("sampling.temperature=1.2", "sampling.max_tokens=32", "trainer.learning_rate=1e-3")
"""Samples that differ, some of which are cut off, and policies that move far in a step."""
_OLDER = ("cispo", "gspo", "corrections")
"""Examples with stale tokens. In theirs, the engines read KV of older weights (`keep`), which no
checkpoint has; here it is computed again."""
_CORRECTIONS = (
    "token_truncated",
    "token_masked",
    "sequence_truncated",
    "sequence_masked",
    "sequence_rejected",
    "none",
)


def _of(name: str, *settings: str) -> Case:
    return Case(f"algorithms/{name}", (*_LOOSE, *settings))


QUICK = {
    "grpo": _of("grpo"),
    "dapo": _of("dapo", *_STALE, "trainer.overlong_buffer=8"),
    "ppo": _of("ppo", "trainer.ppo_epochs=2", "trainer.minibatches=2"),
    "turns": Case("calculator", ("sampling.temperature=1.3", "trainer.learning_rate=1e-3")),
    "ranks": _of("ppo", "trainer.ranks=2", "trainer.critic.passes=2"),
    "resumed": Case(
        "algorithms/grpo", (*_LOOSE, "trainer.reference_refresh_steps=2"), 4, resume_after=2
    ),
}
SMOKE = ("grpo",)
ALL = {
    **QUICK,
    "nucleus": _of(
        "dapo",
        *_STALE,
        "sampling.top_p=0.9",
        "sampling.top_k=12",
        "sampling.min_p=0.02",
        "trainer.kl_coefficient=0.05",
        "trainer.reference_decay=0.5",
        "trainer.max_grad_norm=0.05",
        "trainer.weight_decay=0.1",
        "trainer.optimizer_state=bfloat16",
    ),
    "lora": Case("lora", (*_LOOSE, "trainer.kl_coefficient=0.05")),
    "turns_ppo": Case(
        "calculator",
        (
            "sampling.temperature=1.3",
            "trainer.learning_rate=1e-3",
            "trainer.algorithm=ppo",
            "trainer.advantage_normalization=std",
            "trainer.critic.truncated=bootstrap",
        ),
    ),
    **{
        name: _of(name, *(_STALE if name in _OLDER else ()))
        for name in ("cispo", "dr_grpo", "gpg", "gspo", "reinforce", "rloo", "corrections")
    },
    "reinforce_plus_plus_baseline": _of("reinforce_plus_plus"),
    "reinforce_plus_plus": _of(
        "reinforce_plus_plus",
        "trainer.algorithm=reinforce_plus_plus",
        "trainer.kl_coefficient=0.1",
        "trainer.kl_estimator=k3",
    ),
    "ppo_streamed": _of("ppo", "trainer.critic.truncated=bootstrap", "trainer.critic.gamma=0.99"),
    **{
        one: _of(
            "dr_grpo",
            *_STALE,
            "scheduler.max_off_policy_steps=2",
            f"trainer.correction={one}",
            "trainer.importance_cap=1.1",
        )
        for one in _CORRECTIONS
    },
}


TOLERANCE = 2e-3
"""Of what float32 computes: metrics, gradients in the first moment."""
_ROOT = Path(__file__).parents[2]
_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "what most people run, and no more")
    parser.add_argument("--runs", nargs="*", choices=ALL, help="only these")
    parser.add_argument("--folder", type=Path, help="of runs; those there are not run again")
    given = parser.parse_args(arguments)
    names = given.runs or list(SMOKE if given.smoke else QUICK if given.quick else ALL)
    found: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="step-audit-") as temporary:
        parent = given.folder or Path(temporary)
        small = smoke_settings(parent) if given.smoke else ()
        for name in names:
            found[name] = _audit(_run(parent, name, ALL[name], small))
    gaps = [(name, what, gap) for name, of in found.items() for what, gap in of.items()]
    beyond = [one for one in gaps if not one[2] <= TOLERANCE]
    worst = sorted((one for one in gaps if one[2]), key=lambda one: -one[2])
    title = f"largest relative differences; {len(beyond)} are above {TOLERANCE}"
    shown = table(title, "run,quantity,difference", worst, left=("quantity",))
    report(given, "step_audit", {"differences": found}, {"beyond": len(beyond)}, shown)
    return 1 if beyond else 0


def _run(parent: Path, name: str, case: Case, more: Sequence[str] = ()) -> Path:
    """A finished run's folder; `more` are settings."""
    folder = parent / name
    if (folder / "result.json").exists():
        return folder
    example = _ROOT / "examples" / f"{case.example}.yaml"
    settings = [*COMMON, *case.settings, f"run.directory={parent}", f"run.name={name}", *more]
    for steps, how in ((case.resume_after, ()), (case.steps, ("--resume",))):
        if steps is not None:
            resumes = how if case.resume_after else ()
            command = run_command(example, [*settings, f"run.steps={steps}"], *resumes)
            subprocess.run(command, check=True, timeout=_SECONDS)
    return folder


def _audit(path: Path) -> dict[str, float]:
    source = yaml.safe_load((path / "config.yaml").read_text())["model"]["path"]
    folder = Folder(path, Path(resolve_model(ModelConfig(path=source), None)))
    worst: dict[str, float] = {}
    model = Model(folder.initial, folder.config["sampling"])
    for quantity, gap in differences(folder, model):
        worst[quantity] = max(worst.get(quantity, 0.0), gap)
    return worst


if __name__ == "__main__":
    sys.exit(main())
