"""Checks and calls the Python interpreter of environment workers (`environment.python`).

The packages of an environment may conflict with asyncrl's. Its workers then run in an interpreter
that has those packages, with the asyncrl of this installation (`external_interpreter.py`).
"""

import json
import subprocess
import sys
from pathlib import Path

from asyncrl.errors import RewardError

_STARTER = str(Path(__file__).with_name("external_interpreter.py"))
_SECONDS = 60.0
_OLDEST = (3, 11)
_ASK = """
import json, sys
try:
    import msgspec
except ImportError:
    msgspec = None
print(json.dumps([sys.version_info[0], sys.version_info[1], msgspec is not None]))
"""


def command(module: str, python: str | None) -> tuple[str, ...]:
    """Return the command line of a module with a function `main`, without its arguments."""
    if python is None:
        return sys.executable, "-P", "-m", module
    return python, "-P", _STARTER, module


def check_interpreter(python: str) -> str:
    """Return the interpreter's version. Raises RewardError if it cannot run a worker."""
    where = f"environment.python: {python}"
    if Path(python).is_dir():
        inside = Path(python) / "bin" / "python"
        hint = f"; did you mean {inside}?" if inside.is_file() else ", not an interpreter"
        raise RewardError(f"{where} is a folder{hint}")
    if not Path(python).is_file():
        raise RewardError(
            f"{where} does not exist. Give the path of the interpreter that has the environment's "
            "packages: python3 -m venv .venv-mine; .venv-mine/bin/pip install msgspec PACKAGES; "
            "environment.python: .venv-mine/bin/python (docs/environments.md)"
        )
    try:
        asked = [str(Path(python).absolute()), "-c", _ASK]
        answer = subprocess.run(asked, capture_output=True, timeout=_SECONDS, check=True, cwd="/")
        *version, has_msgspec = json.loads(answer.stdout)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        said = f": {last[0]:.200}" if last else ""
        raise RewardError(f"{where} is not a working Python interpreter{said}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise RewardError(f"{where} is not a working Python interpreter: {error}") from error
    shown = ".".join(map(str, version))
    if tuple(version) < _OLDEST:
        raise RewardError(f"{where} is Python {shown}; asyncrl's worker needs 3.11 or newer")
    if not has_msgspec:
        raise RewardError(f"{where} lacks msgspec; install it: {python} -m pip install msgspec")
    return shown
