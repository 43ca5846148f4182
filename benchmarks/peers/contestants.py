"""Who is compared, and how each is started: all train on the same configuration."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.tasks.model import default_cache_dir
from benchmarks.harness import overrides, run_command
from benchmarks.peers.shared_data import Step, read_steps

PACKAGES = ("trl==1.16.0", "accelerate==1.15.0")
"""Of these versions, with what they need and this interpreter lacks."""
INSTALL_SECONDS = 600.0
"""Longest time for the installation."""


class TrlMissingError(Exception):
    """TRL cannot be installed here. The message says why and what to do."""


def ensure_trl(cache_dir: Path | None = None, packages: Sequence[str] = PACKAGES) -> Path:
    """The Python of an environment with TRL. It is made if it is missing (under a minute).

    All but TRL and what it needs is this interpreter's, so both sides use the same kernels.
    """
    shared = sysconfig.get_paths()["purelib"]
    content = "\n".join((*packages, shared, sys.version))
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    place = (cache_dir or default_cache_dir()) / f"trl-{digest}"
    python = place / "bin" / "python"
    if (place / "complete").is_file():
        return python
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(place)])
        own = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        (Path(own.strip()) / "zz-shared.pth").write_text(shared + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        _run([*pip, "install", "--quiet", "--no-input", *packages])
        _run([str(python), "-c", "import importlib.metadata as m; m.version('trl')"])
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(place, ignore_errors=True)
        raise TrlMissingError(
            f"TRL cannot be installed into {place}: {_reason(error)}. Give pip an index that has "
            f"{', '.join(packages)} (PIP_INDEX_URL), or leave TRL out with --contestants"
        ) from error
    (place / "complete").touch()
    return python


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS
    )
    return done.stdout


def _reason(error: Exception) -> str:
    """The last line in which pip names an error, or the error itself."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        named = [line for line in lines if line.startswith("ERROR")] or lines
        if named:
            return str(named[-1]).removeprefix("ERROR: ")
    return str(error)


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
    from benchmarks.tiny_models import widen

    widen(str(ensure_model(ModelRecipe())), folder / "uneven", UNEVEN_WIDTH)
    return folder / "uneven"


def _epochs(folder: Path) -> Path:
    from benchmarks.tiny_models import widen

    widen(str(_example(folder)), folder / "epochs", EPOCHS_WIDTH)
    return folder / "epochs"


CONFIG = EXAMPLES / "arithmetic.yaml"
ROOT = EXAMPLES.parent
TRL = "TRL"
SYNC, KEEP, VERIFY, VERIFY_VLLM = "sync", "keep(1)", "verify", "verify on vLLM"
ON_POLICY_MODES = (SYNC, VERIFY, VERIFY_VLLM)
"""asyncrl's modes whose tokens are all drawn by the policy in training, as TRL's are."""
ESSENTIAL = (TRL, SYNC, VERIFY)
"""What --quick compares."""


@dataclass(frozen=True)
class Training:
    command: list[str]
    environment: dict[str, str]
    read: Callable[[], list[Step]]
    """Reads the steps after the training."""


@dataclass(frozen=True)
class Contestant:
    name: str
    threads: int
    """Of each of its processes that computes. One process has both cores, two have one each."""
    start: Callable[[tuple[str, ...], Path, int], Training]
    """From all `--set` values, an empty folder and the number of threads."""


def contestants() -> tuple[Contestant, ...]:
    """All of them, in the order in which they run."""
    keep = ("scheduler.on_update=keep",)
    verify = ("scheduler.on_update=verify", "scheduler.max_off_policy_steps=0")
    return (
        Contestant(TRL, 2, _trl),
        Contestant(SYNC, 1, _asyncrl(*keep, "scheduler.max_off_policy_steps=0")),
        Contestant(KEEP, 1, _asyncrl(*keep, "scheduler.max_off_policy_steps=1")),
        Contestant(VERIFY, 1, _asyncrl(*verify)),
        Contestant(VERIFY_VLLM, 1, _asyncrl(*verify, "engine.kind=vllm")),
    )


def _trl(settings: tuple[str, ...], folder: Path, threads: int) -> Training:
    log = folder / "steps.jsonl"
    module = ("-m", "benchmarks.peers.trl_train", str(CONFIG), str(log))
    command = [str(ensure_trl()), *module, *overrides(settings)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Training(command, environment, lambda: read_steps(log))


def _asyncrl(*mode: str) -> Callable[[tuple[str, ...], Path, int], Training]:
    def start(settings: tuple[str, ...], folder: Path, threads: int) -> Training:
        own = (f"run.directory={folder}", "run.name=run", f"launcher.threads={threads}")
        command = run_command(CONFIG, (*settings, *mode, *own))

        def read() -> list[Step]:
            steps = read_metrics(folder / "run" / "metrics.jsonl")
            return [
                Step(step.wall_seconds, step.learning.reward_mean, step.batch.tokens)
                for step in steps
            ]

        return Training(command, {}, read)

    return start
