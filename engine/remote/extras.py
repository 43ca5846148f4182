"""Additions of the generator's process to an engine's own requests, results and configuration.

Both sides read and write these values only here. Imports no engine and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.trajectory import FloatArray, IntArray, KeptTokens


class StagingReport(msgspec.Struct, frozen=True):
    """State of staging weights."""

    state: Literal["running", "staged", "refused", "superseded"]
    message: str = ""
    """Reason, if it was refused or superseded."""

    @classmethod
    def of_all(cls, reports: Sequence[StagingReport]) -> StagingReport:
        """Combine the reports of at least one rank: running, then refused, superseded, staged."""
        order = ("running", "refused", "superseded", "staged")
        return min(reports, key=lambda report: order.index(report.state))


class RemoteWorker:
    """The calls. Every rank of the model executes each of them."""

    def asyncrl_begin_staging(self, manifest: dict[str, Any]) -> None:
        """Begin to copy the weights of a manifest in a thread, after a staging still running."""
        raise NotImplementedError

    def asyncrl_staging(self) -> dict[str, Any]:
        """Return a `StagingReport` (as builtins) of the staging begun last."""
        raise NotImplementedError

    def asyncrl_install(self, policy_version: int) -> str:
        """Put the staged weights of this version in place, while generation is paused.

        Returns why the engine had to load them, and will for all versions; "" if they were copied.
        """
        raise NotImplementedError

    def asyncrl_begin_fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Begin a `Fingerprint` of the weights in use, by names and shapes of the HF state dict."""
        raise NotImplementedError

    def asyncrl_fingerprint(self) -> dict[str, Any] | None:
        """Continue it for a few milliseconds; return the `Fingerprint` once it is done."""
        raise NotImplementedError

    def asyncrl_save_cache(self) -> int:
        """Write the snapshot of the cache of rollouts; returns its bytes."""
        raise NotImplementedError


NO_TICKET = 0
"""Ticket of a request that does not generate."""


class DrafterSettings(msgspec.Struct, frozen=True):
    """Settings from which the worker builds its drafter."""

    cache: dict[str, Any]
    """A `CacheConfig` as JSON."""
    place: str
    """A `CachePlace` as `asyncrl.cache.sharing.cache_setup.to_json` gives it."""
    fixed_step_tokens: int | None
    """The engine's `max_step_tokens`: fill steps with drafts to this many tokens. None: draft what
    pays."""
    max_step_tokens: int
    """The engine's limit of tokens in a step."""
    logits_bytes: int
    """Memory for the float32 logits of a step that drafts: engines plan for one row of logits for
    each request, none for a draft token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExtra:
    """The parameters of a request besides its tokens, limits, temperature and top-p."""

    seed: int
    generated: int = 0
    """Response tokens that its prompt ends with."""
    cache_key: str = ""
    """Name of the tree that it drafts from and feeds; "": none."""
    draft: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[D]` an earlier continuation, drafted from first."""
    priority: int = 0
    """0: a step waits for it."""
    top_k: int = 0
    min_p: float = 0.0
    top_k_logprobs: int = 0
    """K of the reported lists: of each drawn token, or of each scored one."""
    ticket: int = NO_TICKET
    scored: int = 0
    """Last tokens of the prompt to score, in a scoring request."""
    kept: KeptTokens | None = None
    """The kept tokens, if they are to be verified."""

    def to_plain(self) -> dict[str, Any]:
        """Convert to plain values for msgpack."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        plain["draft"] = self.draft.astype("<i4").tobytes()
        plain["kept"] = None if self.kept is None else _kept_to_plain(self.kept)
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RequestExtra:
        """Read what `to_plain` made."""
        section = dict(plain)
        draft, kept = section.pop("draft"), section.pop("kept")
        return cls(
            **section,
            draft=np.frombuffer(draft, "<i4").astype(np.int32),
            kept=None if kept is None else _kept_from_plain(kept),
        )


_KEPT_ARRAYS = {
    "tokens": "<i4",
    "logprobs": "<f4",
    "topk_ids": "<i4",
    "topk_logprobs": "<f4",
    "noise_seeds": "<u8",
    "observed": "?",
}


def _kept_to_plain(kept: KeptTokens) -> dict[str, Any]:
    arrays = {
        name: np.ascontiguousarray(getattr(kept, name), dtype).tobytes()
        for name, dtype in _KEPT_ARRAYS.items()
    }
    return arrays | {"k": int(kept.topk_ids.shape[1]), "lenience": kept.lenience}


def _kept_from_plain(plain: dict[str, Any]) -> KeptTokens:
    arrays = {name: np.frombuffer(plain[name], dtype) for name, dtype in _KEPT_ARRAYS.items()}
    shape = len(arrays["tokens"]), plain["k"]
    for name in ("topk_ids", "topk_logprobs"):
        arrays[name] = arrays[name].reshape(shape)
    return KeptTokens(**arrays, contexts=(), lenience=plain["lenience"])


class StepTable(NamedTuple):
    """The tokens of one step, in one piece for all requests."""

    ids: IntArray
    """`[N, 1 + K]` the token that was drawn at each place, then its list, padded with -1."""
    logprobs: FloatArray
    """`[N, 1 + K]` their log-probabilities, padded with -inf."""
    tickets: NDArray[np.int64]
    """`[N]` tickets; tokens of a request follow each other. NO_TICKET marks tokens of no request:
    that of an unfinished prompt, those of a request that was aborted during the step, and accepted
    drafts after a stop token or the limit."""


class Outcome(IntEnum):
    """Result of verifying a token."""

    KEPT = 0
    DRAWN = 1
    """Another one was drawn in its place, with fresh noise."""
    RENAMED = 2
    """The same noise gives it another name."""


@dataclass(frozen=True, slots=True)
class ScoreColumns:
    """Columns of the table that comes back for a scored request.

        token | outcome | K listed tokens

    It has a row for each scored token; after verification, for the tokens that stay and the one
    after them, if one was drawn, with the lists of the kept tokens. Otherwise lists are the K most
    probable tokens. The outcome column has no log-probability.
    """

    k: int
    own: int = 0
    outcome: int = 1

    @property
    def listed(self) -> slice:
        """Columns of the list."""
        return slice(2, 2 + self.k)

    @property
    def width(self) -> int:
        """Number of columns."""
        return 2 + self.k
