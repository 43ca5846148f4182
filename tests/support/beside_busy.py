"""Run a command beside processes that never rest, with the priority of everything else.

    python tests/support/beside_busy.py 2 make test

They end with this process, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_SPIN = "n = 0\nwhile True:\n    n = (n * 1103515245 + 12345) % 2147483648"
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run `arguments[1:]` beside `arguments[0]` busy processes; return its exit status."""
    count, *command = arguments
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", _SPIN],
            preexec_fn=_end_with_parent,
        )
        for _ in range(int(count))
    ]
    print(f"{len(busy)} busy processes beside the command, {os.cpu_count()} cores", flush=True)
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
