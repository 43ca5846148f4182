"""Asks a server through the `openai` client, which repeats attempts and keeps connections and key.

    call ──► breaker ──► at most `concurrency` at once ──► attempt ──► answer
                                                   ▲          │ 408, 409, 429, 5xx, too slow,
                                                   └─ openai ─┘ no connection

Every call ends before its deadline (`services.calls`), with an answer or with a `NoRewardError`
that says what the server did at the last attempt. After some failed calls in a row the breaker
fails calls at once, but for one every while. A call that fails has used all its attempts, or all
its time, so an outage that is shorter than `rewards.timeout_seconds` opens nothing.
"""

import asyncio
import functools
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import openai

from asyncrl.rewards.protocol import FailureReason
from asyncrl.rewards.services import calls
from asyncrl.rewards.services.settings import Limits, read_secret
from asyncrl.rewards.values import NoRewardError
from asyncrl.user_code.process import LOOPBACK

MAX_ANSWER_BYTES = 4 << 20
_SHOWN = 300
"""Characters of a server's answer that an error quotes."""
_CONNECT_SECONDS = 10.0
_OUTAGES = frozenset({"unavailable", "timeout", "garbage"})
"""Failures that say something about the server, not about the sample."""


class Breaker:
    """Suspends calls after failures: `failures` in a row open it.

    While it is open, it admits one call, the probe, every `seconds`.
    """

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float]) -> None:
        self._failures, self._seconds, self._clock = failures, seconds, clock
        self._in_a_row, self._probe_at = 0, 0.0

    @property
    def is_open(self) -> bool:
        """True if calls fail at once, except for probes."""
        return self._in_a_row >= self._failures

    @property
    def seconds_left(self) -> float:
        """Seconds until the next probe."""
        return max(0.0, self._probe_at - self._clock())

    def admits(self) -> bool:
        """Return True if a call may be made now; the call is a probe if the breaker is open."""
        if not self.is_open:
            return True
        if self.seconds_left > 0:
            return False
        self._probe_at = self._clock() + self._seconds
        return True

    def succeeded(self) -> None:
        """Note an answer, which closes the breaker."""
        self._in_a_row = 0

    def failed(self, *, probe: bool = False) -> bool:
        """Note a failure; return True if it opened the breaker, or kept it open after a probe."""
        was_open = self.is_open
        self._in_a_row += 1
        if not self.is_open or (was_open and not probe):
            return False
        self._probe_at = self._clock() + self._seconds
        return True


@dataclass(slots=True)
class _Attempts:
    """The attempts of one call."""

    ends: float
    """Deadline of the call, in monotonic seconds."""
    made: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    kind: str = ""
    """Cause of the last failure."""
    last: str = "no connection was free"
    """The last failure in words."""

    def begin(self) -> None:
        if self.made:
            self.retries[self.kind] += 1
        self.made += 1
        self.last = f"it did not answer at attempt {self.made}"

    def failed(self, kind: str, words: str) -> None:
        self.kind, self.last = kind, f"{words} (attempt {self.made})"


_current: ContextVar[_Attempts] = ContextVar("attempts")


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return what all clients of this process trust. It is read once."""
    return ssl.create_default_context()


class Client:
    """The connections of one worker process to one server. Used from one event loop.

    `what` names the server in errors. `secret` is sent as a bearer token and never shown.
    """

    def __init__(self, what: str, url: str, secret: str | None, limits: Limits) -> None:
        self.what, self._secret, self._limits = what, secret, limits
        self._breaker = Breaker(limits.breaker_failures, limits.breaker_seconds, time.monotonic)
        self._room = asyncio.Semaphore(limits.concurrency)
        seconds = limits.attempt_seconds
        connect = min(_CONNECT_SECONDS, seconds or _CONNECT_SECONDS)
        # The library's environment variables are for OpenAI's endpoint: their values are not sent.
        own = dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), openai.omit)
        key = f"Bearer {secret}" if secret else openai.omit
        self._options: openai.RequestOptions = {"headers": own | {"Authorization": key}}
        self._openai = openai.AsyncOpenAI(
            base_url=url,
            api_key="none",
            max_retries=limits.attempts - 1,
            timeout=openai.Timeout(seconds, connect=connect),
            http_client=_Http(
                verify=_certificates(),
                trust_env=urlsplit(url).hostname not in LOOPBACK,  # its proxies
                follow_redirects=False,
            ),
        )

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post `body` as JSON and return the decoded answer.

        Raises NoRewardError: `breaker_open`, `unavailable`, `timeout`, `refused`, `denied` or
        `garbage`.
        """
        began, opened = time.monotonic(), False
        if not self._breaker.admits():
            calls.report(0, {}, 0.0, opened=False)
            raise NoRewardError(
                "breaker_open",
                f"{self.what} was not asked, after {self._limits.breaker_failures} failed calls in "
                f"a row; the next attempt is in {self._breaker.seconds_left:.0f} s",
            )
        probe, attempts = self._breaker.is_open, _Attempts(calls.deadline())
        try:
            answer = await self._answer(path, body, attempts)
            self._breaker.succeeded()
            return answer
        except NoRewardError as error:
            if error.reason in _OUTAGES:
                opened = self._breaker.failed(probe=probe)
            else:
                self._breaker.succeeded()
            raise
        finally:
            retries, seconds = attempts.retries, time.monotonic() - began
            calls.report(1 + retries.total(), dict(retries), seconds, opened=opened)

    async def close(self) -> None:
        """Close the connections."""
        await self._openai.close()

    async def _answer(self, path: str, body: dict[str, Any], attempts: _Attempts) -> Any:
        _current.set(attempts)
        reason: FailureReason = "unavailable"
        try:
            async with asyncio.timeout(attempts.ends - time.monotonic()), self._room:
                raw = await self._openai.post(path, cast_to=bytes, body=body, options=self._options)
            if len(raw) <= MAX_ANSWER_BYTES:
                return msgspec.json.decode(raw)
            reason, words = "garbage", f"the answer exceeds {MAX_ANSWER_BYTES >> 20} MiB"
        except TimeoutError:
            reason, words = "timeout", f"no answer in time: {attempts.last}"
        except openai.APIStatusError as error:
            reason, words = _reason_of(error.status_code), attempts.last
            if error.status_code not in (401, 403):
                words += f": {error.response.text[: 4 * _SHOWN]}"
        except openai.APIConnectionError:
            words = attempts.last
        except (msgspec.DecodeError, UnicodeDecodeError):
            shown = raw[: 4 * _SHOWN].decode(errors="replace")
            reason, words = "garbage", f"the answer is not JSON: {shown}"
        if self._secret:  # which some servers repeat
            words = words.replace(self._secret, "***")
        words = " ".join(words.split())
        raise NoRewardError(reason, f"{self.what}: {words[:_SHOWN]}")


def _reason_of(status: int) -> FailureReason:
    """Return the reason of a failure with this status after the last attempt.

    The texts in the request may cause a refusal, unless every request has it: a wrong key gives 401
    or 403, an unknown model 404, a wrong address 404, 405 or a redirect.
    """
    if status in (408, 409, 429) or status >= 500:
        return "unavailable"
    return "denied" if status < 400 or status in (401, 402, 403, 404, 405, 407, 410) else "refused"


class _Http(openai.DefaultAsyncHttpxClient):
    """Records the result of each attempt."""

    async def send(self, request: Any, **more: Any) -> Any:
        """Make one attempt."""
        attempts = _current.get()
        attempts.begin()
        try:
            response = await super().send(request, **more)
        except Exception as error:
            kind = "timeout" if "Timeout" in type(error).__name__ else "connection"
            attempts.failed(kind, f"{type(error).__name__} {error}".strip())
            raise
        status = response.status_code
        if not response.is_success:
            kind = "throttled" if status == 429 else "server_error"
            attempts.failed(kind, f"{status} {response.reason_phrase}")
            wait = response.headers.get("Retry-After", "")
            if wait.isdecimal() and time.monotonic() + int(wait) >= attempts.ends:
                response.headers["x-should-retry"] = "false"  # the library obeys it
                attempts.last += f"; the server allows the next one in {wait} s, which is too late"
        return response


_clients: dict[tuple[str, str, tuple[str | None, str | None], Limits], Client] = {}


async def close_clients() -> None:
    """Close the clients of this process; they cannot be used in another event loop."""
    while _clients:
        await _clients.popitem()[1].close()


def client_of(
    what: str,
    url: str,
    keys: tuple[str, str],
    secret: tuple[str | None, str | None],
    limits: Limits,
) -> Client:
    """Return this process's client for a server.

    `secret` is the environment variable and the file of the key, and `keys` are the names of their
    two settings.
    """
    place = (what, url, secret, limits)
    if place not in _clients:
        _clients[place] = Client(what, url, read_secret(what, keys, *secret), limits)
    return _clients[place]


async def refusal(call: Awaitable[float], seconds: float) -> NoRewardError | None:
    """Return the error of a call within this time, or None. Closes the clients."""
    calls.begin(seconds)
    try:
        await call
    except NoRewardError as error:
        return error
    finally:
        await close_clients()
    return None
