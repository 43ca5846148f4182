"""What the command line loads before it starts the processes that need more."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["asyncrl.cli", "asyncrl.controller.execute", "asyncrl.python_run"]
)
def test_the_controller_starts_without_torch(module: str) -> None:
    """Torch takes five seconds to import; a wrong setting or run name is reported before that."""
    heavy = "{'torch', 'transformers', 'numba', 'datasets', 'ray'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_package_itself_imports_nothing() -> None:
    """Every child imports it; `asyncrl.Run` is looked up when it is used."""
    code = "import sys, asyncrl; print({'msgspec', 'pydantic', 'yaml', 'zmq'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "set()"
    code = "from asyncrl import Result, Run; print(Run.__name__, Result.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "Run Result"
