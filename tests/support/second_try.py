"""Run the few tests that failed once more, alone, after the rest of the suite has ended.

    python tests/support/second_try.py .pytest_cache/outcome.json

The file is written by `suite_summary` (`--outcome`). At most `MOST` failed tests get a second try.
If all of them pass, the exit status is 0 and the last lines name each one as SECOND TRY with its
first failure. Such a line means a fault of the product until its cause is known (CONTRIBUTING.md).
Otherwise the exit status is 1, as it is when the first run was not ended by failed tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MOST = 3
"""More failures than this are not chance."""
LIMIT_SECONDS = 900
"""Of one test alone."""


def runs_alone(test: str) -> bool:
    """Run one test in a pytest of its own.

    Args:
        test: its node id.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", test]
    try:
        return subprocess.run(command, check=False, timeout=LIMIT_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{test} did not end within {LIMIT_SECONDS} s")
        return False


def second_try(outcome: Path, run: Callable[[str], bool] = runs_alone) -> int:
    """Decide about a run that failed.

    Args:
        outcome: file that the first run wrote.
        run: runs one test and returns True if it passed.

    Returns:
        The exit status.
    """
    try:
        said = json.loads(outcome.read_text(encoding="utf-8"))
    except FileNotFoundError:
        print("NO SECOND TRY: the tests did not run to their end")
        return 1
    failed: dict[str, str] = said["failed"]
    if said["exit_status"] != 1 or not failed:
        print(f"NO SECOND TRY: pytest ended with exit status {said['exit_status']}")
        return 1
    if len(failed) > MOST:
        print(f"NO SECOND TRY: {len(failed)} tests failed, which is more than {MOST}")
        return 1
    again = [test for test in failed if not run(test)]
    for test in again:
        print(f"FAILED TWICE: {test}")
    if again:
        return 1
    for test, why in failed.items():
        print(f"SECOND TRY {test}\n  its first failure: {why}")
    print(f"SECOND TRY: {len(failed)} of the tests passed only alone, see CONTRIBUTING.md")
    return 0


def main(arguments: Sequence[str]) -> int:
    return second_try(Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
