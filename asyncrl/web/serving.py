"""The controller's side: a listening socket, and a process that starts on a connection.

A run whose page is never opened does not have a web process. The socket outlives the process, so
the address stays the same, and connections wait for a new process. Errors here do not affect
training. The token of a run's web page authorises orders.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.launch.records import MARK_VARIABLE, ProcessRecords
from asyncrl.monitoring.config import WebConfig, host_port, is_loopback
from asyncrl.secret_files import refuse_open_file

logger = logging.getLogger(__name__)

MIN_LENGTH = 16
_TOKEN = re.compile(r"[!-~]+")
_MAX_BYTES = 4096
MAX_STARTS = 4
"""The first start, and three restarts after early ends."""
LONG_SECONDS = 3600.0
"""A process that lived for this long did not end early, and the count begins again."""
PAUSE_SECONDS = 1.0
"""Pause between the end of a process and the next start; later ones are 3 and 9 times as long."""
_BACKLOG = 128
_END_SECONDS = 2.0


def token_path(run: Path, token_file: str | None) -> Path:
    """Return the path of a run's token; `token_file` is `monitoring.web.token_file`."""
    return run / "web.token" if token_file is None else Path(token_file)


def write_token(path: Path) -> None:
    """Write a new token to a new file that only this user can read. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def read_token(path: Path) -> str:
    """Read a token. Raises UserError if it is missing, short, or readable by others."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_BYTES + 1).decode("ascii", "replace").strip()
    except OSError as error:
        raise UserError(f"the web page's token {path} cannot be read: {error.strerror}") from error
    refuse_open_file(path, status, "the token of the web page (monitoring.web.token_file)")
    if len(text) < MIN_LENGTH or len(text) > _MAX_BYTES or not _TOKEN.fullmatch(text):
        raise UserError(
            f"{path} does not hold a token: it must be one word of at least {MIN_LENGTH} "
            "ASCII letters, digits or symbols, for instance from `openssl rand -hex 32`"
        )
    return text


def listen(config: WebConfig) -> socket.socket:
    """Open the socket. Raises UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((config.host, config.port))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UserError(
            f"the web page cannot be served on {host_port(config.host, config.port)} "
            f"({error.strerror or error}): set monitoring.web.host to an address of this machine, "
            "monitoring.web.port to 0 or a free number above 1023, or monitoring.web.enabled to "
            "false"
        ) from error
    listening.setblocking(False)
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the address of the page."""
    host, port = listening.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)  # noqa: S104
    return f"http://{host_port(shown, port)}"


class WebPage:
    """The web page of an active run; `given_up` is called with the reason if it ends for good.

    Raises UserError if the address or the token file cannot be used.
    """

    def __init__(
        self, config: WebConfig, run: Path, records: ProcessRecords, given_up: Callable[[str], None]
    ) -> None:
        self._run = run
        self._records = records
        self._given_up = given_up
        self._token = token_path(run, config.token_file)
        if config.token_file is not None:
            read_token(self._token)
        self._socket = listen(config)
        if config.token_file is None:
            write_token(self._token)
        self._elsewhere = not is_loopback(self._socket.getsockname()[0])
        self.url = url_of(self._socket)
        self._process: subprocess.Popen[bytes] | None = None
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """End the process and free the port. Idempotent. An error is logged, not raised."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close()
        if self._process is None:
            return
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except Exception:
            logger.exception("the process of the web page did not shut down cleanly")
        finally:
            self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _serve(self) -> None:
        try:
            try:
                why = await self._serve_until_given_up()
            except Exception as error:  # whatever it is, training continues
                logger.exception("cannot serve the web page any longer")
                why = f"the web page cannot be served: {type(error).__name__}: {error}"
                self._end_process()
            self._socket.close()
            self._given_up(f"{why}. Training continues")
        except Exception:
            logger.exception("cannot report the end of the web page")

    async def _serve_until_given_up(self) -> str:
        ended_soon = 0
        while True:
            await self._connection()
            began = time.monotonic()
            process = self._start()
            await asyncio.to_thread(process.wait)
            ended_soon = 1 if time.monotonic() - began >= LONG_SECONDS else ended_soon + 1
            if ended_soon == MAX_STARTS:
                return (
                    f"the process of the web page ended {MAX_STARTS} times and is not started "
                    f"again; the cause is in {self._log}"
                )
            await asyncio.sleep(PAUSE_SECONDS * 3 ** (ended_soon - 1))

    async def _connection(self) -> None:
        loop, connected = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, connected.set)
        try:
            await connected.wait()
        finally:
            loop.remove_reader(self._socket)

    @property
    def _log(self) -> Path:
        return self._run / "logs" / "web.log"

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._socket.fileno()
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "asyncrl.web.process", str(self._run)),
                    *(f"--socket={descriptor}", f"--parent={os.getpid()}"),
                    f"--token-file={self._token}",
                    *(["--elsewhere"] if self._elsewhere else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[descriptor],
                env=os.environ | {MARK_VARIABLE: self._records.mark},
                start_new_session=True,
            )
        self._records.add("web", process.pid)
        return process
