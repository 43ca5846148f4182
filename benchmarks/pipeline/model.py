"""The model of benchmarks.pipeline: responses of very uneven length, at the cost of a bigger model.

The built-in model is taught to muse before it answers: with some probability it first generates
meaningless letters of geometric length, a short run after a blank or a long one after a full stop,
like `.hegfhhefgeh,5+8+0=13,9+3+1=13,2+0+1=03:333`. Answer and reward stay the same, and a drafter
gains nothing in the letters. Then the model is widened (`benchmarks.tiny_models.widen`).
"""

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np

from asyncrl.tasks.builtin.arithmetic import Problem, working
from asyncrl.tasks.builtin.warm_start_recipe import RECIPE, WarmStart
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from benchmarks.policies import Variety, teach
from benchmarks.tiny_models import SMOKE_START


@dataclass(frozen=True)
class Musing:
    """One kind of run of letters: opening, letters, frequency, length."""

    opening: str
    letters: str
    share: float
    """Probability that an answer begins with it."""
    mean: float
    """Mean of the geometric distribution of its length, at least 1."""


@dataclass(frozen=True)
class Muser(Variety):
    """Answers that may begin with a musing."""

    musings: tuple[Musing, ...] = (Musing(" ", "abcd", 0.4, 10.0), Musing(".", "efgh", 0.2, 70.0))
    max_letters: int = 160
    """Most letters of a musing."""
    steps: int = 700
    learning_rate: float = 2e-3

    def text(self, problem: Problem, rng: np.random.Generator, slip: float) -> str:
        """A worked answer, sometimes after a musing."""
        return self._musing(rng) + working(problem, rng, slip)

    def _musing(self, rng: np.random.Generator) -> str:
        at = rng.random()
        for musing in self.musings:
            if at < musing.share:
                length = min(int(rng.geometric(1 / musing.mean)), self.max_letters)
                return musing.opening + "".join(rng.choice(list(musing.letters), length)) + ","
            at -= musing.share
        return ""


@dataclass(frozen=True)
class ModelRecipe:
    """How the model is trained. The digest of this names the model's folder."""

    warm_start: WarmStart = RECIPE
    muser: Muser = field(default_factory=Muser)
    version: int = 1
    """Increased when a code change makes the same numbers lead to another model."""

    def digest(self) -> str:
        """A hash of everything that determines the model."""
        content = json.dumps(asdict(self), sort_keys=True) + metadata.version("asyncrl")
        return hashlib.sha256(content.encode()).hexdigest()[:12]


SMOKE_MODEL = ModelRecipe(SMOKE_START, Muser(steps=2))


def ensure_model(recipe: ModelRecipe, cache_dir: Path | None = None) -> Path:
    """Folder of a recipe's model before widening; a missing one is trained (a minute or two)."""
    place = (cache_dir or default_cache_dir()) / f"muser-{recipe.digest()}"
    if not (place / "config.json").is_file():
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=place.parent) as made:
            start = ensure_builtin_model(place.parent, None, recipe.warm_start)
            teach(start, Path(made) / "taught", recipe.warm_start, recipe.muser)
            (Path(made) / "taught").rename(place)
    return place
