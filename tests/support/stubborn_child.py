"""Stands for a child with an engine: it and a process that it has started do not end by SIGTERM.

It writes both process ids, what it was given and what it read to the log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = subprocess.Popen(["sleep", "600"], start_new_session=True)
    spec = json.loads(sys.argv[1])
    heard = sys.stdin.buffer.read().decode(errors="replace")
    shown = {
        "pids": [os.getpid(), engine.pid],
        "parent": spec["parent"] == os.getppid(),
        "data_address": spec["data_address"],
        "heard": heard,
        "config": [os.environ["ASYNCRL_RUN_CONFIG"], "password" in sys.argv[1]],
        "leads": os.getsid(0) == os.getpid(),
    }
    print(json.dumps(shown), flush=True)
    if heard == "end":
        sys.exit(7)
    time.sleep(600)


if __name__ == "__main__":
    main()
