"""Implements `asyncrl web`: the link to an active run's page, or the page of an ended run."""

import asyncio
import contextlib
import logging
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import yaml

from asyncrl.errors import UserError
from asyncrl.monitoring.config import WebConfig
from asyncrl.runs.directory import is_alive, read_state
from asyncrl.suggestions import command_for
from asyncrl.web.serving import listen, read_token, token_path, url_of


def show_page(run: Path, port: int, say: Callable[[str], None]) -> None:
    """Print the link of an active run, by `say`; serve an ended run at `port` until Ctrl-C.

    Raises UserError if the run does not have a page, or the port is in use.
    """
    if is_alive(run):
        if port:
            raise UserError(
                f"--port is for the page of an ended run, and the run in {run} is active: "
                f"`{command_for('web', run)}` prints the link to its page, whose port is "
                "monitoring.web.port of the run's configuration"
            )
        say(link(run))
        return
    from asyncrl.web.guard import Policy
    from asyncrl.web.server import serve

    logging.getLogger("asyncrl.web").setLevel(logging.ERROR)
    # uvicorn closes connections at Ctrl-C, and then raises it.
    with contextlib.suppress(KeyboardInterrupt), listen(WebConfig(port=port)) as listening:
        say(f"{url_of(listening)} shows the ended run in {run}; Ctrl-C ends this page")
        asyncio.run(serve(run, Policy(is_loopback=True, token=None), listening, ended=True))


def link(run: Path) -> str:
    """Return an active run's address with the token behind `#`, never sent. Raises UserError."""
    state = read_state(run)
    if state is None or not state.web:
        raise UserError(
            f"the run in {run} is active and has no web page: monitoring.web.enabled is false, the "
            "run has just started, or its page ended (see its log)"
        )
    token = read_token(token_path(run, _token_file(run)))
    return f"{state.web}/#token={urllib.parse.quote(token, safe='')}"


def _token_file(run: Path) -> str | None:
    try:
        config = yaml.safe_load((run / "config.yaml").read_text())
        found = config["monitoring"]["web"]["token_file"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
