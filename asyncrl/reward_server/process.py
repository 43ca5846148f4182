"""Entry point of a run's own reward server: `python -m asyncrl.reward_server.process ...`.

It inherits the listening socket, says on another descriptor that it is ready, and ends with the
controller.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec

from asyncrl.errors import UserError
from asyncrl.user_code.process_tree import end_with_parent


def main() -> None:
    """Serve the model that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", help="ClassifierSettings as JSON")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--ready", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    end_with_parent(given.parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from asyncrl.reward_server.classifier import ClassifierSettings
    from asyncrl.reward_server.serving import ServerSettings, serve

    settings = msgspec.json.decode(given.settings, type=ClassifierSettings)
    listening = socket.socket(fileno=given.socket)

    def ready(described: str) -> None:
        logging.getLogger(__name__).info("serves %s", described)
        os.write(given.ready, b"ready")
        os.close(given.ready)

    try:
        asyncio.run(serve(ServerSettings(settings), listening, ready))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
