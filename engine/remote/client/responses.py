"""The responses that the core generates: the steps of all of them become chunks for each reader.

The core labels each step with the version of the weights that drew it, so a chunk has one version.
A response ends where the core ends it, also when it is interrupted, so the place never depends on
the tokens behind it. This side ends it where a stop string is complete, which the core does not
check, or when its reader has gone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.remote.client.unreported import NEW, NO_ROW, Tickets, Unreported
from asyncrl.engine.remote.extras import NO_TICKET, StepTable
from asyncrl.engine.sampling.drawing import noise_seeds
from asyncrl.rollout.trajectory import FinishReason, FloatArray, IntArray

T = TypeVar("T")


class AbortedError(EngineError):
    """The request was aborted from this side."""


class Inbox(Generic[T]):
    """Items for one reader, who is woken by each item, an end or an error."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._error: BaseException | None = None
        self._ready = asyncio.Event()
        self.started = False
        """True once an item or the end has arrived."""
        self.closed = False
        self.ticket = NO_TICKET

    def push(self, item: T, *, last: bool = False) -> None:
        """Add an item, and close the inbox after the last one; dropped if it is closed already."""
        if self.closed:
            return
        self._items.append(item)
        self.started = True
        self.closed |= last
        self._ready.set()

    def put(self, item: object) -> None:
        """Close it after an abort, or with an exception if the core died; items stay readable."""
        self.fail(item if isinstance(item, BaseException) else AbortedError("aborted"))

    def interrupt(self) -> None:
        """Interrupt the reader; scores are dropped."""
        self.put(None)

    def fail(self, error: BaseException) -> None:
        """Close it with an error, which every later `take` raises once nothing is left."""
        if self.closed:
            return
        self._error = error
        self.started = self.closed = True
        self._ready.set()

    @property
    def over(self) -> bool:
        """True once the last item was taken."""
        return self.closed and self._error is None and not self._items

    async def take(self) -> list[T]:
        """Wait for items, or `interrupt`, and take all of them.

        Raises AbortedError or EngineError once nothing is left of an aborted or failed request.
        """
        await self._ready.wait()
        if not self.closed:
            self._ready.clear()
        if not self._items and self._error is not None:
            raise self._error
        taken, self._items = self._items, []
        return taken


@dataclass(frozen=True, slots=True)
class Scored:
    """The table of a scoring request."""

    ids: IntArray
    """`[n, C]` for n scored tokens; columns as in `asyncrl.engine.remote.extras.ScoreColumns`."""
    logprobs: FloatArray
    """`[n, C]`"""
    policy_version: int


def not_finite(request_id: str) -> str:
    """Return the error message for a distribution that is NaN."""
    return (
        f"request {request_id!r}: the model's probabilities are not finite: its weights or "
        "activations overflowed"
    )


class Responses:
    """The responses of the core, in chunks of at least `chunk_tokens` tokens; the first has one."""

    def __init__(self, chunk_tokens: int) -> None:
        self._unreported = Unreported(chunk_tokens)
        self._tickets = Tickets()
        self._expected: dict[int, Response] = {}
        """Responses by ticket that have no row yet."""
        self._responses: dict[int, Response] = {}
        self._policy_version = 0

    @property
    def tokens(self) -> int:
        """Tokens generated since the start."""
        return self._unreported.recorded

    def expect(self, response: Response) -> int:
        """Return the ticket to send the request of a response with."""
        ticket = self._tickets.take()
        self._expected[ticket] = response
        return ticket

    def record(self, table: StepTable, policy_version: int) -> None:
        """Add a step of the core's, and end responses whose stop string is complete."""
        if policy_version != self._policy_version:
            self.flush()
            self._policy_version = policy_version
        rows, longest, new = self._tickets.rows_of(table.tickets)
        if new:
            for ticket in set(table.tickets[rows == NEW].tolist()):
                self._open(self._expected.pop(ticket))
            rows, longest, _ = self._tickets.rows_of(table.tickets)
        for row in self._unreported.record(rows, table, longest):
            self.end(self._responses[row], "stop")

    def _open(self, response: Response) -> None:
        request, state = response.request, 0
        rule = request.sampling.stop_rule
        if rule is not None:
            turn = request.prefix_tokens[request.turn_start :]
            state = rule.follow(rule.start, turn)[1]
        response.started = True
        response.row = self._unreported.open(rule, state)
        self._responses[response.row] = response
        self._tickets.set_row(response.ticket, response.row)

    def report_due(self) -> None:
        """Deliver first tokens, and chunks that are long enough."""
        for row in self._unreported.due():
            self._report(self._responses[row], None)

    def flush(self) -> None:
        """Deliver everything that was generated."""
        for row in np.flatnonzero(self._unreported.count).tolist():
            self._report(self._responses[row], None)

    def end(self, response: Response, reason: FinishReason, accepted: int | None = None) -> None:
        """End a response that is not closed, with the drafts `accepted` in all steps.

        These include those cut off at the end; None: the core does not count them or know the end.
        """
        if response.closed:
            return
        if response.row == NO_ROW:  # it ends without any token
            self._open(self._expected.pop(response.ticket))
        if accepted is not None:
            self._unreported.correct_last(response.row, accepted)
        self._report(response, reason)
        self._release(response)

    def cut(self, response: Response) -> None:
        """Deliver what was generated of a response, and drop what comes later."""
        if response.row != NO_ROW and self._unreported.count[response.row]:
            self._report(response, None)
        self._release(response)

    def _release(self, response: Response) -> None:
        self._tickets.give_back(response.ticket)
        self._expected.pop(response.ticket, None)
        if response.row != NO_ROW:
            del self._responses[response.row]
            self._unreported.close(response.row)
            response.row = NO_ROW

    def _report(self, response: Response, reason: FinishReason | None) -> None:
        """Deliver what was generated of a response, with its end if it has ended."""
        request = response.request
        generated = self._unreported.take(response.row, request.sampling.top_k_logprobs)
        if not self._unreported.finite[response.row]:
            response.fail(EngineError(not_finite(request.request_id)))
            return
        chunk = TokenChunk(
            request_id=request.request_id,
            **generated._asdict(),
            noise_seeds=np.full(len(generated.tokens), response.noise_seed(self._policy_version)),
            policy_version=self._policy_version,
            finish_reason=reason,
        )
        response.push(chunk, last=reason is not None)


class Response(Inbox[TokenChunk]):
    """One response, and its chunks on their way to the reader."""

    def __init__(self, request: GenerateRequest, seed: int, responses: Responses) -> None:
        super().__init__()
        self.request = request
        self._seed = np.array([seed], np.uint64)
        self._noise: tuple[int, np.uint64] | None = None
        self.row = NO_ROW
        """Row in `responses`, from its first step to its end."""
        self._responses = responses
        self.ticket = responses.expect(self)

    def noise_seed(self, policy_version: int) -> np.uint64:
        """Return the seed of the noise that draws tokens outside the lists under this version."""
        if self._noise is None or self._noise[0] != policy_version:
            self._noise = policy_version, noise_seeds(self._seed, policy_version)[0]
        return self._noise[1]

    def interrupt(self) -> None:
        """Wake the reader; only the core can end the response, as it knows what it has drawn."""
        self._ready.set()

    def put(self, item: object) -> None:
        """Close it; chunks already drawn are still delivered."""
        self._responses.cut(self)
        super().put(item)
