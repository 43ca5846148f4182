"""Prints the rows of an environment: `python -m asyncrl.environments.rows NAME > FILE`.

The output is JSON lines for `task.path`, for example from the adapter for verifiers. The
environment's code runs in this process or, with `--python PATH`, in the interpreter that has its
packages (`environment.python`).
"""

import json
import os
import sys
from pathlib import Path

from asyncrl.environments.registry import load_factory
from asyncrl.environments.workers.interpreter import check_interpreter, command
from asyncrl.errors import RewardError
from asyncrl.user_code.loading import search


def main() -> None:
    """Print the rows of the named environment; its arguments may follow as JSON."""
    words = sys.argv[1:]
    python = words[1] if words[:1] == ["--python"] and len(words) > 1 else None
    words = words if python is None else words[2:]
    if len(words) not in (1, 2) or words[0].startswith("-"):
        sys.exit("usage: python -m asyncrl.environments.rows [--python PATH] NAME [ARGS_AS_JSON]")
    search(str(Path.cwd()))
    try:
        if python is not None:
            check_interpreter(python)
            os.execv(python, [*command("asyncrl.environments.rows", python), *words])  # noqa: S606
        factory = load_factory(words[0], json.loads((*words, "{}")[1]))
    except (RewardError, ValueError) as error:
        sys.exit(str(error))
    made = getattr(factory, "func", None)  # a partial holds a class and its arguments
    rows = getattr(factory, "rows", None) or getattr(made, "rows", None)
    if rows is None:
        sys.exit(f"environment {sys.argv[1]} does not have rows; give it a dataset")
    for row in rows():
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
