"""What is trained in benchmarks.peers, and when an accuracy counts as reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COMMON = ("trainer.checkpoint_every=100000", "evaluation.prompts=1")
"""No contestant evaluates or writes checkpoints while it is timed."""


@dataclass(frozen=True)
class Workload:
    """One model, its data, and one configuration for all contestants."""

    name: str
    title: str
    settings: tuple[str, ...]
    """`--set` values on top of `examples/arithmetic.yaml`, the same for all contestants."""
    steps: int
    accuracy: float
    """Mean reward, sampled as in training, at which the clock is stopped."""
    quick: tuple[int, tuple[str, ...]] | None = None
    """Steps and further settings under --quick, if they differ."""

    def shortened(self) -> Workload:
        if self.quick is None:
            return self
        steps, settings = self.quick
        return replace(self, steps=steps, settings=(*self.settings, *settings), quick=None)

    def config(self, model: Path, seed: int, steps: int | None = None) -> tuple[str, ...]:
        own = (f"model.path={model}", f"run.seed={seed}", f"run.steps={steps or self.steps}")
        return (*COMMON, *self.settings, *own)


EXAMPLE = Workload(
    name="example",
    title="(a) examples/arithmetic.yaml, built-in model of 0.4M parameters",
    settings=(),
    steps=80,
    accuracy=0.91,
)
UNEVEN = Workload(
    name="uneven",
    title="(b) uneven lengths (the model of benchmarks.pipeline), 3M parameters",
    settings=(
        "sampling.max_tokens=208",
        *("engine.slots=64", "engine.max_model_len=256"),
        *("scheduler.group_size=8", "scheduler.groups_per_step=8"),
        "trainer.learning_rate=3.0e-4",
    ),
    steps=24,
    accuracy=0.76,
)
EPOCHS = Workload(
    name="epochs",
    title="(c) the model of (a) with 30M parameters, two epochs",
    settings=(
        *("task.train_size=64", "engine.slots=32"),
        *("scheduler.group_size=8", "scheduler.groups_per_step=4"),
        *("trainer.learning_rate=2.0e-4", "trainer.micro_batch_tokens=320"),
    ),
    steps=32,
    accuracy=0.77,
    quick=(20, ("task.train_size=40",)),
)
SMOKE = Workload(
    name="smoke",
    title="two steps of the built-in model in miniature",
    settings=("scheduler.group_size=4", "scheduler.groups_per_step=4", "engine.slots=16"),
    steps=2,
    accuracy=0.9,
)
WORKLOADS = (EXAMPLE, UNEVEN, EPOCHS)
UNEVEN_WIDTH = 4000
"""`intermediate_size` of (b), a third of that in benchmarks.pipeline to save time."""
EPOCHS_WIDTH = 39_000
"""`intermediate_size` of (c)."""


def make_model(workload: Workload, folder: Path) -> Path:
    """Folder of a workload's model; missing ones are trained first, which takes minutes."""
    makers: dict[str, Callable[[Path], Path]] = {
        "example": _example,
        "uneven": _uneven,
        "epochs": _epochs,
        "smoke": _smoke,
    }
    return makers[workload.name](folder)


def _example(folder: Path) -> Path:
    from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model

    del folder
    return ensure_builtin_model(default_cache_dir())


def _smoke(folder: Path) -> Path:
    from asyncrl.tasks.model import ensure_builtin_model
    from benchmarks.tiny_models import SMOKE_START

    return ensure_builtin_model(folder, None, SMOKE_START)


def _uneven(folder: Path) -> Path:
    from benchmarks.pipeline.model import ModelRecipe, ensure_model
    from benchmarks.widen import widen

    widen(str(ensure_model(ModelRecipe())), folder / "uneven", UNEVEN_WIDTH)
    return folder / "uneven"


def _epochs(folder: Path) -> Path:
    from benchmarks.widen import widen

    widen(str(_example(folder)), folder / "epochs", EPOCHS_WIDTH)
    return folder / "epochs"
