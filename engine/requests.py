"""Checks of requests before they wait for a slot, and their seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from asyncrl.engine.errors import RequestError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, ScoreRequest
from asyncrl.rollout.acceptance import MASS_TOLERANCE
from asyncrl.rollout.trajectory import IntArray, KeptTokens

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the requests that an engine can serve."""

    max_model_len: int
    vocab_size: int
    top_k: int

    def check_generate(self, request: GenerateRequest) -> None:
        """Raise RequestError, naming the request, if it cannot be served."""
        name, sampling = request.request_id, request.sampling
        self._check_sampling(name, sampling)
        if sampling.top_k_logprobs not in (0, self.top_k):
            # A token is drawn with the list that is reported.
            raise RequestError(
                f"request {name!r}: top_k_logprobs={sampling.top_k_logprobs} must be 0 or "
                f"engine.top_k_logprobs={self.top_k}"
            )
        for what, tokens in (
            ("prompt_tokens", request.prompt_tokens),
            ("prefix_tokens", request.prefix_tokens),
            ("draft_tokens", request.draft_tokens),
        ):
            self._check_tokens(name, what, tokens)
        prompt, prefix = len(request.prompt_tokens), len(request.prefix_tokens)
        if prompt == 0:
            raise RequestError(f"request {name!r}: prompt_tokens is empty, at least 1 is needed")
        if prompt + sampling.max_tokens > self.max_model_len:
            raise RequestError(
                f"request {name!r}: a prompt of {prompt} tokens and max_tokens="
                f"{sampling.max_tokens} exceed engine.max_model_len={self.max_model_len}"
            )
        if prefix >= sampling.max_tokens:
            raise RequestError(
                f"request {name!r}: its prefix of {prefix} tokens leaves nothing to generate in "
                f"max_tokens={sampling.max_tokens}"
            )
        self._check_turn(request)
        if request.kept is not None:
            self._check_kept(name, request.kept, sampling.max_tokens - prefix)

    def _check_turn(self, request: GenerateRequest) -> None:
        """Raise RequestError if this turn has already ended within the prefix."""
        name, prefix, begin = request.request_id, request.prefix_tokens, request.turn_start
        if not 0 <= begin <= len(prefix):
            raise RequestError(
                f"request {name!r}: turn_start={begin} must be from 0 to the {len(prefix)} tokens "
                "of its prefix"
            )
        rule = request.sampling.stop_rule
        if rule is not None and rule.follow(rule.start, prefix[begin:])[0] is not None:
            raise RequestError(
                f"request {name!r}: its prefix contains a stop string {rule.strings}, so it has "
                "ended already"
            )

    def check_score(self, request: ScoreRequest) -> None:
        """Raise RequestError, naming the request, if it cannot be scored."""
        name = request.request_id
        self._check_sampling(name, request.sampling)
        self._check_tokens(name, "prompt_tokens", request.prompt_tokens)
        self._check_tokens(name, "tokens", request.tokens)
        if len(request.prompt_tokens) == 0:
            raise RequestError(f"request {name!r}: prompt_tokens is empty, at least 1 is needed")
        length = len(request.prompt_tokens) + len(request.tokens)
        if length > self.max_model_len:
            raise RequestError(
                f"request {name!r}: {length} tokens exceed engine.max_model_len="
                f"{self.max_model_len}"
            )

    def _check_sampling(self, name: str, sampling: SamplingParams) -> None:
        if not (sampling.temperature > 0 and math.isfinite(sampling.temperature)):
            raise RequestError(
                f"request {name!r}: temperature={sampling.temperature} must be greater than 0 "
                "(greedy decoding has no behaviour probability)"
            )
        refusal = sampling.truncation.refusal()
        if refusal is not None:
            raise RequestError(f"request {name!r}: {refusal}")
        if sampling.max_tokens < 1:
            raise RequestError(f"request {name!r}: max_tokens={sampling.max_tokens} must be >= 1")
        if not 0 <= sampling.top_k_logprobs <= self.top_k:
            raise RequestError(
                f"request {name!r}: top_k_logprobs={sampling.top_k_logprobs} must be from 0 to "
                f"engine.top_k_logprobs={self.top_k}"
            )
        if any(not 0 <= stop < self.vocab_size for stop in sampling.stop_tokens):
            raise RequestError(
                f"request {name!r}: stop_tokens {sampling.stop_tokens} must be ids from 0 to "
                f"{self.vocab_size - 1}"
            )

    def _check_kept(self, name: str, kept: KeptTokens, room: int) -> None:
        self._check_tokens(name, "kept.tokens", kept.tokens)
        size, ids, values = len(kept), kept.topk_ids, kept.topk_logprobs
        if size > room:
            raise RequestError(
                f"request {name!r}: {size} kept tokens, but max_tokens leaves room for {room} only"
            )
        shaped = ids.ndim == 2 and ids.shape == values.shape and len(ids) == size
        shaped = shaped and kept.logprobs.shape == kept.noise_seeds.shape == (size,)
        # SPEC-RL's rule needs no list.
        if not shaped or (kept.lenience is None and ids.shape[1] != self.top_k):
            raise RequestError(
                f"request {name!r}: {size} kept tokens need as many logprobs and noise seeds and "
                f"two tables [{size}, {self.top_k}] (engine.top_k_logprobs), not "
                f"{kept.logprobs.shape}, {kept.noise_seeds.shape}, {ids.shape} and {values.shape}"
            )
        self._check_tokens(name, "kept.topk_ids", ids[ids != -1])
        ordered = np.sort(ids, axis=1)
        if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
            raise RequestError(f"request {name!r}: kept.topk_ids has an id twice at one position")
        if not np.isfinite(kept.logprobs).all() or np.isnan(values).any():
            raise RequestError(
                f"request {name!r}: kept.logprobs must be finite and kept.topk_logprobs not nan"
            )
        # The rule would refuse it too, but in the middle of a step, for all requests.
        mass = np.exp(values.astype(np.float64)).sum(axis=1)
        if (mass > 1.0 + MASS_TOLERANCE).any():
            raise RequestError(
                f"request {name!r}: kept.topk_logprobs is no part of a distribution: at position "
                f"{mass.argmax()} it has mass {mass.max():.4f}"
            )
        if kept.lenience is not None and not 0 < kept.lenience < math.inf:
            raise RequestError(
                f"request {name!r}: kept.lenience={kept.lenience} must be greater than 0, or None"
            )
        _check_observed(name, kept)

    def _check_tokens(self, name: str, what: str, tokens: IntArray) -> None:
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise RequestError(
                f"request {name!r}: {what} has ids from {tokens.min()} to {tokens.max()}, but the "
                f"model's vocabulary is 0 to {self.vocab_size - 1}"
            )


def _check_observed(name: str, kept: KeptTokens) -> None:
    """Raise RequestError for observed tokens that are uncertain or can be split off."""
    if kept.observed.shape != (len(kept),):
        raise RequestError(
            f"request {name!r}: kept.observed says of {kept.observed.shape} tokens whether they "
            f"were observed, and there are {len(kept)}"
        )
    at = np.flatnonzero(kept.observed)
    if not len(at):
        return
    if kept.lenience is not None:
        raise RequestError(
            f"request {name!r}: kept.lenience={kept.lenience} with {len(at)} observed tokens: only "
            "the exact rule keeps an observation with the turn before it, so lenience must be None"
        )
    own = kept.topk_ids[at] == kept.tokens[at, None]
    sure = np.where(own, kept.topk_logprobs[at] == 0, kept.topk_ids[at] == -1)
    if not sure.all() or (kept.topk_ids.shape[1] and not own.any(axis=1).all()):
        raise RequestError(
            f"request {name!r}: an observed kept token must be the only one of its list, with "
            f"log-probability 0; that at position {at[~sure.all(axis=1)][:1]} is not"
        )


class SeedStream:
    """Seeds of requests: their own, or the next of the engine's stream."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def seed_of(self, sampling: SamplingParams) -> int:
        """Return the seed of one request, 0 to 2**64 - 1."""
        if sampling.seed is None:
            return int(self._generator.integers(0, 1 << 63))
        return sampling.seed & _SEED_MASK
