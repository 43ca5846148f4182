"""Paths and limits in a configuration; `~` and `${NAME}` in a path are expanded when it is read."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

from asyncrl.wire.transport.environment import expand

WEEK_SECONDS = 7 * 24 * 3600
"""Longest limit of a wait."""
START_SECONDS = 1800.0
"""Default limit of a start. vLLM's own is 600 s, which the weights of a large model on a network
disk, compilation and CUDA graphs exceed together."""
MAX_THREADS = 1024
"""Most threads of a process for tensor operations: more than the cores of any machine."""
MAX_TOKENS = 1 << 24
"""Most tokens of one sequence or one step: 16 times the longest context in use."""
MAX_STEPS = 10**9
MAX_STOP_BYTES = 256
"""Bytes of all stop strings together, in UTF-8; each is a state of the automaton over tokens."""

FOLDER = "folder"
"""Key of the folder of the configuration file, a Path, in the context of a validation."""
_FUNCTION = re.compile(r"((?:[a-z_]+:)?)([^:]+\.py)(:\w+)")
"""A function or class in a file: `file.py:name`, also after a kind, as in `agent:file.py:name`."""


def _from_its_folder(path: str, info: ValidationInfo) -> str:
    """Return the full path of a file that is not here, but next to the configuration file."""
    folder = (info.context or {}).get(FOLDER)
    if folder is None or Path(path).exists() or not (folder / path).exists():
        return path
    return str(folder.resolve() / path)


def _in_its_folder(name: str, info: ValidationInfo) -> str:
    """Do the same for the file of a function."""
    found = _FUNCTION.fullmatch(name)
    return name if found is None else found[1] + _from_its_folder(found[2], info) + found[3]


def _absolute(path: str) -> str:
    if not path:
        raise ValueError("a path cannot be empty")
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - as it is written otherwise


LocalPath = Annotated[str, AfterValidator(expand)]
"""A setting that names a file or folder."""
InputPath = Annotated[LocalPath, AfterValidator(_from_its_folder)]
"""A file or folder that a run reads. A relative path that is not found at the current directory
starts at the folder of the configuration file."""
FunctionName = Annotated[LocalPath, AfterValidator(_in_its_folder)]
"""A function or class that may be in a file, which is found as an `InputPath` is."""
AbsolutePath = Annotated[str, AfterValidator(expand), AfterValidator(_absolute)]
"""A path that other commands look up too, from any directory: a relative path starts at the folder
in which the run was started."""
