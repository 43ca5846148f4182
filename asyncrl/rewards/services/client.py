"""Posts JSON to a server: kept connections, limits, retries, the breaker, counts.

    call ──► breaker ──► at most `concurrency` at once ──► attempt ──► answer
                                                   ▲          │ 429, 5xx, no connection, too slow
                                                   └─ backoff ┘

Every call ends before its deadline (`services.calls`), with an answer or with a `NoRewardError`
that says what the server did at the last attempt.

A circuit breaker: after some failed calls in a row, calls fail at once for a while.

    closed ── `failures` failed calls in a row ──► open ── after `seconds` ──► half open
       ▲                                            ▲                             │
       └──────────── the probe succeeds ────────────┼─────────────────────────────┤
                                                    └────── the probe fails ──────┘

A call that fails has used all its attempts, or all its time. So an outage that is shorter than
`rewards.timeout_seconds` opens nothing. While the breaker is open, a run with `rewards.on_error:
zero` does not spend that time on every sample.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from asyncrl.rewards.protocol import FailureReason
from asyncrl.rewards.services import calls
from asyncrl.rewards.services.settings import Limits, read_secret
from asyncrl.rewards.values import NoRewardError


class Breaker:
    """Decides whether a call may be made. Pure: the clock is given.

    Args:
        failures: failed calls in a row that open it.
        seconds: from when it opens until one call, the probe, is let through.
        clock: monotonic seconds.

    Example:
        >>> now = 0.0
        >>> breaker = Breaker(2, 30.0, lambda: now)
        >>> [(breaker.admits(), breaker.failed()) for _ in range(2)]
        [(True, False), (True, True)]
        >>> breaker.admits()
        False
        >>> now = 30.0
        >>> breaker.admits(), breaker.admits()
        (True, False)
    """

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float]) -> None:
        self._failures, self._seconds, self._clock = failures, seconds, clock
        self._in_a_row = 0
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once, the probe excepted."""
        return self._open_until is not None

    @property
    def seconds_left(self) -> float:
        """Until the next probe; 0 if it is closed or the probe is due."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def admits(self) -> bool:
        """Whether a call may be made now. If so, one of the three methods below must follow.

        The call is the probe if the breaker is open then.
        """
        if self._open_until is None:
            return True
        if self._probing or self._clock() < self._open_until:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The server has answered."""
        self._in_a_row, self._open_until, self._probing = 0, None, False

    def failed(self, *, probe: bool = False) -> bool:
        """A call failed; True if this opened the breaker, or kept it open after the probe."""
        self._in_a_row += 1
        if self._in_a_row < self._failures:
            return False
        if self.is_open and not probe:  # a call from before it opened
            return False
        self._open_until, self._probing = self._clock() + self._seconds, False
        return True

    def abandoned(self, *, probe: bool = False) -> None:
        """The call was given up and says nothing. If it was the probe, the next call is one."""
        if probe:
            self._probing = False


FIRST_SECONDS = 0.25
LONGEST_SECONDS = 8.0


def is_worth_repeating(status: int) -> bool:
    """Whether another attempt may get another answer: 429, 408 and every 5xx but 501 and 505."""
    return status in (408, 429) or (status >= 500 and status not in (501, 505))


def is_about_the_request(status: int) -> bool:
    """Whether a refusal may be the fault of the texts in the request, and not of all requests.

    A wrong key gives 401 or 403, a name of a model that the server does not know 404, an address
    that it does not have 404, 405 or a redirect.
    """
    return 400 <= status < 500 and status not in (401, 402, 403, 404, 405, 407, 410)


def backoff(attempt: int, rng: random.Random) -> float:
    """Seconds before the next attempt: doubled each time, between a half and the whole of it.

    Args:
        attempt: how many attempts have failed, at least 1.
        rng: many calls fail at the same moment; it keeps them from returning at the same moment.
    """
    whole: float = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(attempt - 1, 16))
    return whole * rng.uniform(0.5, 1.0)


def retry_after(header: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a `Retry-After` header asks for; None unless it is a number or a date."""
    if header is None:
        return None
    text = header.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except ValueError:
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        seconds = (date - (now or datetime.now(UTC))).total_seconds()  # noqa: TID251 - given a date
    return max(0.0, seconds) if math.isfinite(seconds) else None


MAX_ANSWER_BYTES = 4 << 20
_SHOWN = 300
"""Characters of a server's answer that an error quotes."""
_OUTAGES = frozenset({"unavailable", "timeout", "garbage"})
"""Failures that say something about the server, not about the sample."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where calls go, and how."""

    what: str
    """Names the server in errors."""
    url: str
    secret: str | None
    """Sent as a bearer token; in no error and no log."""
    limits: Limits


class _Again(Exception):  # noqa: N818 - an attempt that is worth repeating
    def __init__(self, kind: str, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.wait = kind, wait


class Client:
    """The connections of one worker process to one server. Used from one event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        limits = target.limits
        self._breaker = Breaker(limits.breaker_failures, limits.breaker_seconds, time.monotonic)
        self._room = asyncio.Semaphore(limits.concurrency)
        self._rng = random.Random()  # noqa: S311 - jitter
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Any) -> Any:
        """Post `body` as JSON; the decoded answer.

        Raises:
            NoRewardError: reason `breaker_open`, `unavailable`, `timeout`, `refused`, `denied`,
                `garbage`.
        """
        began, retries, opened = time.monotonic(), Counter[str](), False
        if not self._breaker.admits():
            calls.report(0, {}, 0.0, opened=False)
            raise NoRewardError(
                "breaker_open",
                f"{self._target.what} was not asked: {self._target.limits.breaker_failures} calls "
                f"in a row had failed; it is tried again in {self._breaker.seconds_left:.0f} s",
            )
        probe = self._breaker.is_open
        try:
            answer = await self._until_deadline(msgspec.json.encode(body), retries)
        except NoRewardError as error:
            if error.reason in _OUTAGES:
                opened = self._breaker.failed(probe=probe)
            else:
                self._breaker.succeeded()
            raise
        except BaseException:
            self._breaker.abandoned(probe=probe)
            raise
        else:
            self._breaker.succeeded()
            return answer
        finally:
            seconds = time.monotonic() - began
            calls.report(1 + retries.total(), dict(retries), seconds, opened=opened)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _until_deadline(self, body: bytes, retries: Counter[str]) -> Any:
        end = calls.deadline()
        last = "no connection was free"
        try:
            async with asyncio.timeout(end - time.monotonic()), self._room:
                for attempt in range(1, self._target.limits.attempts + 1):
                    last = f"it did not answer at attempt {attempt}"
                    try:
                        return await self._attempt(body)
                    except _Again as again:
                        last = f"{again} (attempt {attempt})"
                        wait = backoff(attempt, self._rng)
                        wait = wait if again.wait is None else max(wait, again.wait)
                        if attempt == self._target.limits.attempts:
                            break
                        if time.monotonic() + wait >= end:
                            last += f"; the next would be in {wait:.1f} s, which is too late"
                            break
                        retries[again.kind] += 1
                        await asyncio.sleep(wait)
        except TimeoutError:
            raise NoRewardError(
                "timeout", f"{self._target.what} gave no answer in time: {last}"
            ) from None
        raise NoRewardError("unavailable", f"{self._target.what}: {last}")

    async def _attempt(self, body: bytes) -> Any:
        """One request. Raises _Again, NoRewardError."""
        try:
            async with asyncio.timeout(self._target.limits.attempt_seconds):
                return await self._request(body)
        except TimeoutError:
            if self._target.limits.attempt_seconds is None:
                raise
            raise _Again(
                "timeout", f"no answer within {self._target.limits.attempt_seconds:g} s"
            ) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise _Again("connection", self._clean(f"{type(error).__name__}: {error}")) from None
        except aiohttp.ClientError as error:
            message = self._clean(f"{self._target.what} sent no HTTP: {error}")
            raise NoRewardError("garbage", message) from None

    async def _request(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._target.secret is not None:
            headers["Authorization"] = f"Bearer {self._target.secret}"
        session = self._open_session()
        async with session.post(
            self._target.url, data=body, headers=headers, allow_redirects=False
        ) as response:
            data = await self._read(response)
            if response.status == 200:
                return self._decoded(data)
            said = self._clean(data[: 4 * _SHOWN].decode("utf-8", "replace"))
            words = f"{response.status} {response.reason or ''}".strip()
            if response.status not in (401, 403) and said:
                words += f": {said}"
            if is_worth_repeating(response.status):
                kind = "throttled" if response.status == 429 else "server_error"
                raise _Again(kind, words, retry_after(response.headers.get("Retry-After")))
            reason: FailureReason = "refused" if is_about_the_request(response.status) else "denied"
            raise NoRewardError(reason, f"{self._target.what} refused the request: {words}")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_chunked(1 << 16):
            data += chunk
            if len(data) > MAX_ANSWER_BYTES:
                response.close()
                raise NoRewardError(
                    "garbage", f"{self._target.what} sent more than {MAX_ANSWER_BYTES >> 20} MiB"
                )
        return bytes(data)

    def _decoded(self, data: bytes) -> Any:
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = self._clean(data[: 4 * _SHOWN].decode("utf-8", "replace"))
            raise NoRewardError("garbage", f"{self._target.what} sent no JSON: {said!r}") from None

    def _clean(self, text: str) -> str:
        """Text of a server for an error: short, without the key, which some servers repeat."""
        if self._target.secret:
            text = text.replace(self._target.secret, "***")
        text = " ".join(text.split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The worker limits the calls; the timeouts here are those of `_until_deadline`.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
                trust_env=False,
            )
        return self._session


_clients: dict[tuple[str, str, tuple[str | None, str | None], Limits], Client] = {}
"""Of this process."""


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
    """The client of this process for a server.

    Args:
        what: names the server in errors.
        url: that is posted to.
        keys: the names of the two settings that name a secret, for errors.
        secret: the environment variable and the file that they name.
        limits: of the requests.
    """
    place = (what, url, secret, limits)
    if place not in _clients:
        _clients[place] = Client(Target(what, url, read_secret(what, keys, *secret), limits))
    return _clients[place]


async def refusal(call: Awaitable[float], seconds: float) -> NoRewardError | None:
    """Why a call got no reward within this time; None if it got one. Closes the clients."""
    calls.begin(seconds)
    try:
        await call
    except NoRewardError as error:
        return error
    finally:
        await close_clients()
    return None
