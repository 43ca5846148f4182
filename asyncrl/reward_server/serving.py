"""Serves a reward model on a socket until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from asyncrl.reward_server.app import App
from asyncrl.reward_server.batching import Batcher, BatchSettings
from asyncrl.reward_server.classifier import Classifier, ClassifierSettings

MAX_CONNECTIONS = 4096
"""Further ones get 503."""
KEEP_ALIVE_SECONDS = 75
END_SECONDS = 5


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What is served, and how."""

    classifier: ClassifierSettings
    batching: BatchSettings = field(default_factory=BatchSettings)
    token: str | None = field(default=None, repr=False)
    max_body_bytes: int = 1 << 20


async def serve(
    settings: ServerSettings, listening: socket.socket, ready: Callable[[str], None]
) -> None:
    """Load the model and answer until SIGTERM or SIGINT.

    Args:
        settings: of the server.
        listening: a socket; connections wait on it while the model is loaded.
        ready: told once, with the model in a few words, before the first answer.

    Raises:
        UserError: the model cannot be served.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    classifier = Classifier.load(settings.classifier)
    batcher = Batcher(classifier.score, settings.batching, pads=classifier.pads)
    batcher.start()
    app: Any = App(classifier, batcher, settings.token, settings.max_body_bytes)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=END_SECONDS,
        )
    )
    ready(classifier.described)
    try:
        await server.serve([listening])
    finally:
        await batcher.close()
