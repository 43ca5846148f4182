"""A benchmark that starts a run: `python -m starts_a_run CONFIG KEY=VALUE ...`."""

import subprocess
import sys

from benchmarks.harness import run_command

if __name__ == "__main__":
    subprocess.run(run_command(sys.argv[1], sys.argv[2:]), capture_output=True, check=False)
