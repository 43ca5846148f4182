"""Checks of requests before they wait for a slot, and their seeds."""

import math
from collections.abc import Iterator
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
        _refuse(request.request_id, self._faults(request))

    def check_score(self, request: ScoreRequest) -> None:
        """Raise RequestError, naming the request, if it cannot be scored."""
        _refuse(request.request_id, self._score_faults(request))

    def _faults(self, request: GenerateRequest) -> Iterator[str]:
        sampling = request.sampling
        yield from self._sampling_faults(sampling)
        if sampling.top_k_logprobs not in (0, self.top_k):
            # A token is drawn with the list that is reported.
            given = sampling.top_k_logprobs
            yield f"top_k_logprobs={given} must be 0 or engine.top_k_logprobs={self.top_k}"
        for what in ("prompt_tokens", "prefix_tokens", "draft_tokens"):
            yield from self._token_faults(what, getattr(request, what))
        prompt, prefix = len(request.prompt_tokens), len(request.prefix_tokens)
        if prompt == 0:
            yield "prompt_tokens is empty, at least 1 is needed"
        if prompt + sampling.max_tokens > self.max_model_len:
            yield (
                f"a prompt of {prompt} tokens and max_tokens={sampling.max_tokens} exceed "
                f"engine.max_model_len={self.max_model_len}"
            )
        if prefix >= sampling.max_tokens:
            limit = sampling.max_tokens
            yield f"its prefix of {prefix} tokens leaves nothing to generate in max_tokens={limit}"
        yield from _turn_faults(request)
        if request.kept is not None:
            yield from self._kept_faults(request.kept, sampling.max_tokens - prefix)

    def _score_faults(self, request: ScoreRequest) -> Iterator[str]:
        yield from self._sampling_faults(request.sampling)
        for what in ("prompt_tokens", "tokens"):
            yield from self._token_faults(what, getattr(request, what))
        if len(request.prompt_tokens) == 0:
            yield "prompt_tokens is empty, at least 1 is needed"
        length = len(request.prompt_tokens) + len(request.tokens)
        if length > self.max_model_len:
            yield f"{length} tokens exceed engine.max_model_len={self.max_model_len}"

    def _sampling_faults(self, sampling: SamplingParams) -> Iterator[str]:
        if not (sampling.temperature > 0 and math.isfinite(sampling.temperature)):
            yield (
                f"temperature={sampling.temperature} must be greater than 0 and finite "
                "(greedy decoding has no behaviour probability)"
            )
        refusal = sampling.truncation.refusal()
        if refusal is not None:
            yield refusal
        if sampling.max_tokens < 1:
            yield f"max_tokens={sampling.max_tokens} must be >= 1"
        given = sampling.top_k_logprobs
        if not 0 <= given <= self.top_k:
            yield f"top_k_logprobs={given} must be from 0 to engine.top_k_logprobs={self.top_k}"
        if any(not 0 <= stop < self.vocab_size for stop in sampling.stop_tokens):
            yield f"stop_tokens {sampling.stop_tokens} must be ids from 0 to {self.vocab_size - 1}"

    def _kept_faults(self, kept: KeptTokens, room: int) -> Iterator[str]:
        yield from self._token_faults("kept.tokens", kept.tokens)
        size, ids, values = len(kept), kept.topk_ids, kept.topk_logprobs
        if size > room:
            yield f"{size} kept tokens, but max_tokens leaves room for {room} only"
        shaped = ids.ndim == 2 and ids.shape == values.shape and len(ids) == size
        shaped = shaped and kept.logprobs.shape == kept.noise_seeds.shape == (size,)
        # SPEC-RL's rule needs no list.
        if not shaped or (kept.lenience is None and ids.shape[1] != self.top_k):
            yield (
                f"{size} kept tokens need as many logprobs and noise seeds and two tables "
                f"[{size}, {self.top_k}] (engine.top_k_logprobs), not {kept.logprobs.shape}, "
                f"{kept.noise_seeds.shape}, {ids.shape} and {values.shape}"
            )
        yield from self._token_faults("kept.topk_ids", ids[ids != -1])
        ordered = np.sort(ids, axis=1)
        if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
            yield "kept.topk_ids has an id twice at one position"
        if not np.isfinite(kept.logprobs).all() or np.isnan(values).any():
            yield "kept.logprobs must be finite and kept.topk_logprobs not nan"
        # The rule would refuse it too, but in the middle of a step, for all requests.
        mass = np.exp(values.astype(np.float64)).sum(axis=1)
        if (mass > 1.0 + MASS_TOLERANCE).any():
            at = mass.argmax()
            yield f"kept.topk_logprobs at position {at} has mass {mass.max():.4f}, more than 1"
        if kept.lenience is not None and not 0 < kept.lenience < math.inf:
            yield f"kept.lenience={kept.lenience} must be greater than 0 and finite, or None"
        yield from _observed_faults(kept)

    def _token_faults(self, what: str, tokens: IntArray) -> Iterator[str]:
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            yield (
                f"{what} has ids from {tokens.min()} to {tokens.max()}, but the model's vocabulary "
                f"is 0 to {self.vocab_size - 1}"
            )


def _refuse(name: str, faults: Iterator[str]) -> None:
    """Raise RequestError with the first fault, if any; later checks rely on earlier ones."""
    for fault in faults:
        raise RequestError(f"request {name!r}: {fault}")


def _turn_faults(request: GenerateRequest) -> Iterator[str]:
    """Check that this turn has not ended within the prefix."""
    prefix, begin = request.prefix_tokens, request.turn_start
    if not 0 <= begin <= len(prefix):
        yield f"turn_start={begin} must be from 0 to the {len(prefix)} tokens of its prefix"
    limit, longest = request.sampling.max_turn_tokens, len(prefix) - begin + 1
    if request.kept is not None and len(request.kept):
        observed = np.flatnonzero(request.kept.observed)
        longest = int(np.diff([begin - len(prefix) - 1, *observed, len(request.kept)]).max()) - 1
    if limit is not None and longest > limit:
        yield f"a turn of at least {longest} tokens exceeds max_turn_tokens={limit}"
    rule = request.sampling.stop_rule
    if rule is not None and rule.follow(rule.start, prefix[begin:])[0] is not None:
        yield f"its prefix contains a stop string {rule.strings}, so it has ended already"


def _observed_faults(kept: KeptTokens) -> Iterator[str]:
    """Check that observed tokens are certain and cannot be split off."""
    if kept.observed.shape != (len(kept),):
        yield f"kept.observed must have shape ({len(kept)},), not {kept.observed.shape}"
    at = np.flatnonzero(kept.observed)
    if not len(at):
        return
    if kept.lenience is not None:
        yield (
            f"kept.lenience={kept.lenience} with {len(at)} observed tokens: only the exact rule "
            "keeps an observation with the turn before it, so lenience must be None"
        )
    own = kept.topk_ids[at] == kept.tokens[at, None]
    sure = np.where(own, kept.topk_logprobs[at] == 0, kept.topk_ids[at] == -1)
    if not sure.all() or (kept.topk_ids.shape[1] and not own.any(axis=1).all()):
        yield (
            "an observed kept token must be the only one of its list, with log-probability 0; "
            f"that at position {at[~sure.all(axis=1)][:1]} is not"
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
