"""Entry point of the web process: `python -m asyncrl.web.process RUN --socket FD --parent PID`."""

import argparse
import asyncio
import logging
import os
import signal
import socket
from pathlib import Path

from asyncrl.user_code.process_tree import end_with_parent

NICENESS = 10
"""Training has priority on machines with few cores."""


def main() -> None:
    """Serve the run that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--elsewhere", action="store_true", help="not a loopback address")
    given = parser.parse_args()
    # Exit at once, so that a resumed run finds the port free.
    end_with_parent(given.parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line)
    from asyncrl.web.guard import Policy
    from asyncrl.web.server import serve
    from asyncrl.web.serving import read_token

    policy = Policy(is_loopback=not given.elsewhere, token=read_token(given.token_file))
    listening = socket.socket(fileno=given.socket)
    asyncio.run(serve(given.run, policy, listening, ended=False))


if __name__ == "__main__":
    main()
