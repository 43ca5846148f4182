"""When a request is made again: which answers are worth it, and how long to wait before."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

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
