"""The compiler of this package's kernels."""

from pathlib import Path

import rollout
from rollout.jit import Compiler

kernel = Compiler(Path(__file__).parent, Path(rollout.__file__).parent)
