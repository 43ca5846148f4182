"""Policy versions of a language model, trained by this project.

`asyncrl run benchmarks/vocabulary/run.yaml` takes real steps (GRPO, on-policy, the reward is the
share of short words) in a process of its own. The weights after some of the steps are kept in the
cache directory, under a digest of all that leads to them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from asyncrl.tasks.model import default_cache_dir
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format.files import path_of
from benchmarks.run_command import run_command
from benchmarks.vocabulary.language_model import PROMPTS, LanguageModel, ensure_language_model
from benchmarks.vocabulary.training import TrainingRecipe

_ROOT = Path(__file__).resolve().parent.parent.parent
_RUN = ("benchmarks/vocabulary/run.yaml", "benchmarks/vocabulary/reward.py")
_RECORD = "policies.json"
TRAINING_SECONDS = 1800.0
"""Timeout of the run."""


@dataclass(frozen=True)
class Steps:
    """A model and the policy versions of it that are kept."""

    model: LanguageModel
    keep: tuple[int, ...]
    """Versions (optimizer steps); 0 is the model itself."""
    temperature: float
    """Of sampling, and so of the policy."""
    overrides: tuple[str, ...] = ()
    """Further `--set` values of the run."""

    def digest(self) -> str:
        """Digest of everything that determines the result."""
        content = [self.model.digest(), json.dumps([self.keep, self.temperature, self.overrides])]
        content += [(_ROOT / name).read_text(encoding="utf-8") for name in _RUN]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]


LANGUAGE = Steps(LanguageModel(), keep=(4, 5, 8), temperature=0.8)
"""A trained language model of 32,000 tokens. At temperature 1 so small a model leaves a fifth of
its mass outside the 64 most probable tokens; at 0.8 it is some per cent, as of a large one. Adam's
first steps are not typical and not used. Ten times the learning rate of run.yaml would move the
policy by a total variation of 0.05 a token and step."""
FLAT = Steps(
    LanguageModel(vocabulary=5_000, training=TrainingRecipe(steps=0)),
    keep=(4, 5),
    temperature=1.0,
    overrides=("trainer.learning_rate=1e-4",),
)
"""A vocabulary of 5,000 tokens that are almost equally probable: the model has learned nothing."""


@dataclass(frozen=True)
class PolicyVersions:
    paths: dict[int, Path]
    """Policy version to its HF directory."""
    prompts: Path
    """JSON lines with the field `prompt`."""
    record: dict[str, float]
    """`seconds` it took, and the mean reward of a step by its number, `reward_1` and so on."""


def ensure_versions(steps: Steps, cache_dir: Path | None = None) -> PolicyVersions:
    """The versions of a recipe; what is missing is made first."""
    folder = cache_dir or default_cache_dir()
    model = ensure_language_model(steps.model, folder)
    place = folder / f"vocabulary-policies-{steps.digest()}"
    if not (place / _RECORD).is_file():
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as made:
            _make(steps, model, Path(made))
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(made, place)
    record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
    paths = {version: place / f"step-{version}" for version in steps.keep if version}
    return PolicyVersions({0: model} | paths, model / PROMPTS, record)


def _make(steps: Steps, model: Path, making: Path) -> None:
    began = time.monotonic()
    run = making / "run"
    last = max(steps.keep)
    settings = (
        *(f"run.directory={run}", f"run.steps={last}", f"model.path={model}"),
        *(f"task.path={model / PROMPTS}", f"trainer.keep_checkpoints={last + 1}"),
        *(f"sampling.temperature={steps.temperature}", *steps.overrides),
    )
    command = run_command(_ROOT / _RUN[0], settings)
    sys.stdout.write(f"taking {last} policy steps with {model.name} (once)\n")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TRAINING_SECONDS, check=False, cwd=_ROOT
    )
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RuntimeError(f"taking policy steps failed ({done.returncode}):\n{output}")
    for version in steps.keep:
        if version:
            trained = path_of(run / "policies" / "checkpoints", version)
            export(trained, making / f"step-{version}")
    lines = (run / "policies" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["learning"]["reward_mean"] for line in lines]
    shutil.rmtree(run)
    record = {f"reward_{step}": reward for step, reward in enumerate(rewards, 1)}
    record["seconds"] = round(time.monotonic() - began, 1)
    (making / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
