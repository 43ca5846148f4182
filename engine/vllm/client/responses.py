"""The responses that vLLM generates: the steps of all of them become chunks for each reader.

The core labels each step with the version of the weights that drew it, so a chunk has one version
however late it is read.

A response ends where vLLM ends it, where a stop string is complete (vLLM knows none), or where it
is cut from this side. Whatever vLLM generates after that is dropped, so the place of a cut never
depends on the tokens behind it.
"""

from __future__ import annotations

import numpy as np

from engine.drawing import noise_seeds
from engine.errors import EngineError
from engine.protocol import GenerateRequest, TokenChunk
from engine.vllm.client.inbox import Inbox, not_finite
from engine.vllm.client.unreported import NO_ROW, Index, Unreported
from engine.vllm.extras import StepTable
from rollout.trajectory import FinishReason


class Responses:
    """The responses that vLLM is generating.

    Args:
        chunk_tokens: a chunk has at least so many tokens; the first one of a response has one.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._unreported = Unreported()
        self._responses: dict[int, Response] = {}
        self._policy_version = 0
        self.changes = 0
        """How many times the rows of `open` have changed."""

    @property
    def tokens(self) -> int:
        """Tokens generated since the start."""
        return self._unreported.recorded

    def open(self, response: Response) -> int:
        """The row of a response whose first step has come; NO_ROW if it is closed."""
        if response.closed:
            return NO_ROW
        rule, state = response.request.sampling.stop_rule, 0
        if rule is not None:
            state = rule.follow(rule.start, response.request.prefix_tokens)[1]
        response.started = True
        response.row = self._unreported.open(rule, state)
        self._responses[response.row] = response
        self.changes += 1
        return response.row

    def record(self, rows: Index, table: StepTable, policy_version: int) -> None:
        """Add a step of vLLM's, and end responses whose stop string is complete.

        Args:
            rows: `[R]` of the outputs of the step's message; NO_ROW: not wanted.
            table: of the message.
            policy_version: that drew the tokens.
        """
        if policy_version != self._policy_version:
            self.flush()
            self._policy_version = policy_version
        for row in rows[self._unreported.record(rows, table)].tolist():
            self.end(self._responses[row], "stop")

    def report_due(self) -> None:
        """Hand over first tokens, and chunks that are long enough."""
        unreported = self._unreported
        count = unreported.count
        due = (count >= self._chunk_tokens) | (~unreported.begun & (count > 0))
        for row in np.flatnonzero(due).tolist():
            self._report(self._responses[row], None)

    def flush(self) -> None:
        """Hand over everything that was generated."""
        for row in np.flatnonzero(self._unreported.count).tolist():
            self._report(self._responses[row], None)

    def end(self, response: Response, reason: FinishReason, accepted: int | None = None) -> None:
        """A response has ended. Nothing happens if it was closed before.

        Args:
            response: to end.
            reason: of the end.
            accepted: drafts accepted in all steps, those cut off at the end included; None: vLLM
                does not count them, or does not know the end.
        """
        if response.closed:
            return
        if accepted is not None:
            self._unreported.correct_last(response.row, accepted)
        self._report(response, reason)
        self._release(response)

    def cut(self, response: Response) -> None:
        """Hand over what was generated of a response, and drop what comes later."""
        if response.row != NO_ROW:
            if self._unreported.count[response.row]:
                self._report(response, None)
            self._release(response)

    def _release(self, response: Response) -> None:
        del self._responses[response.row]
        self._unreported.close(response.row)
        response.row = NO_ROW
        self.changes += 1

    def _report(self, response: Response, reason: FinishReason | None) -> None:
        """Hand over what was generated of a response, with its end if it has ended."""
        request = response.request
        generated = self._unreported.take(response.row, request.sampling.top_k_logprobs)
        if not self._unreported.finite[response.row]:
            response.fail(EngineError(not_finite(request.request_id)))
            return
        chunk = TokenChunk(
            request_id=request.request_id,
            tokens=generated.tokens,
            logprobs=generated.logprobs,
            topk_ids=generated.topk_ids,
            topk_logprobs=generated.topk_logprobs,
            noise_seeds=np.full(len(generated.tokens), response.noise_seed(self._policy_version)),
            provenance=generated.provenance,
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
        """In `responses`, from its first step to its end."""
        self._responses = responses

    def noise_seed(self, policy_version: int) -> np.uint64:
        """Of the noise that draws its tokens outside the lists under this version."""
        if self._noise is None or self._noise[0] != policy_version:
            self._noise = policy_version, noise_seeds(self._seed, policy_version)[0]
        return self._noise[1]

    def put(self, item: object) -> None:
        """Close it; what has come is still handed over. Also called by vLLM (`Inbox.put`)."""
        self._responses.cut(self)
        super().put(item)
