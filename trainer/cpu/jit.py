"""The compiler of this package's kernels."""

from pathlib import Path

from asyncrl import rollout
from asyncrl.rollout.jit import Compiler

kernel = Compiler(Path(__file__).parent, Path(rollout.__file__).parent)
