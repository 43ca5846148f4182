"""What the generator's process adds to vLLM's own requests, results and configuration.

vLLM carries these values between its two processes without looking at them. Both sides read and
write them here only. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.trajectory import FloatArray, IntArray, KeptTokens

SECTION = "asyncrl"
"""Key of our part in vLLM's `additional_config` and in a request's `extra_args`."""
_MESSAGES = "asyncrl_messages"
"""Key of `MessageSettings` in `additional_config`."""
NO_TICKET = 0
"""In place of a request's ticket: it generates nothing."""


class DrafterSettings(msgspec.Struct, frozen=True):
    """What the drafter is built from, in `additional_config`."""

    cache: dict[str, Any]
    """A `CacheConfig` as JSON."""
    place: str
    """A `CachePlace` as `cache.place.to_json` gives it."""
    fixed_step_tokens: int | None
    """`VllmConfig.max_step_tokens`: fill steps with drafts to this many tokens. None: draft what
    pays."""
    max_step_tokens: int
    """vLLM's own limit of tokens in a step."""
    logits_bytes: int
    """Memory for the float32 logits of a step that drafts: vLLM's profiling counts one row of
    logits for each request, none for a draft token."""

    def to_config(self) -> dict[str, Any]:
        """The value of `additional_config`."""
        return {SECTION: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, additional_config: dict[str, Any]) -> DrafterSettings:
        """Read what `to_config` made."""
        return msgspec.convert(additional_config[SECTION], cls)


class MessageSettings(msgspec.Struct, frozen=True):
    """What the scheduler's messages are made by, in `additional_config`."""

    steps_per_message: int
    """`VllmConfig.steps_per_message`."""

    def to_config(self) -> dict[str, Any]:
        """The value of `additional_config`."""
        return {_MESSAGES: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, additional_config: dict[str, Any]) -> MessageSettings:
        """Read what `to_config` made."""
        return msgspec.convert(additional_config[_MESSAGES], cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExtra:
    """What a request carries in `SamplingParams.extra_args`."""

    seed: int
    """Of its draws, 0 to 2**64 - 1."""
    generated: int = 0
    """Response tokens that its prompt ends with."""
    cache_key: str = ""
    """Names the tree that it drafts from and feeds; "" for none."""
    draft: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[D]` an earlier continuation, drafted from first."""
    top_k: int = 0
    """Of sampling. vLLM does not sample, and would warn about min-p with drafts."""
    min_p: float = 0.0
    """Of sampling."""
    top_k_logprobs: int = 0
    """Of sampling. vLLM is asked for none: it would slice the step's table for every request."""
    ticket: int = NO_TICKET
    """Comes back with each token that is generated."""
    scored: int = 0
    """Last tokens of the prompt to score, in a scoring request."""
    kept: KeptTokens | None = None
    """What is known of these tokens, if they are to be verified."""

    def to_extra_args(self) -> dict[str, Any]:
        """Plain values that msgpack takes."""
        return {
            SECTION: {
                "seed": self.seed,
                "generated": self.generated,
                "cache_key": self.cache_key,
                "draft": self.draft.astype("<i4").tobytes(),
                "top_k": self.top_k,
                "min_p": self.min_p,
                "top_k_logprobs": self.top_k_logprobs,
                "ticket": self.ticket,
                "scored": self.scored,
                "kept": None if self.kept is None else _kept_to_plain(self.kept),
            }
        }

    @classmethod
    def from_extra_args(cls, extra_args: dict[str, Any] | None) -> RequestExtra:
        """Read what `to_extra_args` made.

        Raises:
            KeyError: the request does not carry our section, so this engine did not send it.
        """
        section = dict((extra_args or {})[SECTION])
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
    return KeptTokens(**arrays, lenience=plain["lenience"])


class StepTable(NamedTuple):
    """What one step generated, in one piece for all of its requests.

    It comes with the first output of the step, in the fields of vLLM's `LogprobsLists`, which this
    type repeats in order. A message has the outputs of one step after those of another.
    """

    ids: IntArray
    """`[N, 1 + K]` the token that was drawn at each place, then its list, padded with -1."""
    logprobs: FloatArray
    """`[N, 1 + K]` their log-probabilities, padded with -inf."""
    tickets: NDArray[np.int64]
    """`[N]` whose tokens these are; those of a request follow each other. NO_TICKET: nobody's.
    vLLM discards the token of a prompt that is not all in, those of a request that was aborted
    meanwhile, and accepted drafts after a stop token or the limit."""


class Outcome(IntEnum):
    """What became of a token that was scored."""

    KEPT = 0
    """It stays as it is."""
    DRAWN = 1
    """Another one was drawn in its place, with fresh noise."""
    RENAMED = 2
    """The same noise gives it another name."""


@dataclass(frozen=True, slots=True)
class ScoreColumns:
    """Columns of the table that comes back for a scored request.

    token | outcome | K listed tokens

    It has a row for each scored token. If they were verified, it has rows for the tokens that stay
    and for the one after them, if one was drawn. Their lists are those of the kept tokens; in all
    other cases they are the K most probable tokens. The column of outcomes has no log-probability.
    """

    k: int
    """K."""
    own: int = 0
    outcome: int = 1
    """An `Outcome`."""

    @property
    def listed(self) -> slice:
        """The list."""
        return slice(2, 2 + self.k)

    @property
    def width(self) -> int:
        """Of the table."""
        return 2 + self.k
