"""A trial call of a reward that asks a server, before a run starts."""

from __future__ import annotations

from collections.abc import Awaitable

from asyncrl.rewards.services import calls
from asyncrl.rewards.services.client import close_clients
from asyncrl.rewards.values import NoRewardError


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
