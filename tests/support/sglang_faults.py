"""What our part of a real SGLang can be told to do wrong. Imported by its scheduler processes."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncrl.cache.tree.rollout_tree import Drafts
from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.engine.sampling.drawing import Streams
from asyncrl.engine.sampling.logits import LogitDraws
from asyncrl.engine.sglang.worker import drawing, scheduler
from asyncrl.engine.sglang.worker.calls import WorkerCalls
from asyncrl.engine.sglang.worker.drafts import drafting, speculation, tree_drawing
from asyncrl.engine.sglang.worker.drafts.tree_drawing import Accepted, TreeDrawing
from asyncrl.engine.sglang.worker.drafts.verify_step import Feed, roots

OVERLAP_VARIABLE = "ASYNCRL_TEST_OVERLAP"
"""In the environment: steps with drafts overlap on a CPU too, as on GPUs."""
STEADY_VARIABLE = "ASYNCRL_TEST_STEADY_CLOCK"
"""In the environment: steps are timed with a clock that moves by the same time at each look.

So every step seems to take about as long as any other, whatever it drafts and however busy the
machine is: the planner learns that drafts are free."""
_TICK = 0.01

_PLANT, _STREAMS = drafting.plant, drawing.Streams
_CLIENT = scheduler.ClientScheduler
_STOP, _FORGET = _CLIENT.stop, _CLIENT._forget_drafts
_HANDLE = speculation.Algorithm.handle_server_args
_fault = "none"


class FaultyCalls(WorkerCalls):
    """What the client may call, and what a test may."""

    def asyncrl_fault(self, kind: str) -> None:
        """Begin a fault and end all others.

        `argmax`: where something is drafted the most probable token is committed, as SGLang's
        verification on a CPU does. `sglang's rule`: drafts are accepted as SGLang's sampling on a
        GPU does. `padded`: the same, with trees that are padded as its NGRAM pads them. `one
        place`: the same random number at every place of a response. `shifted seeds`: the seed of a
        row grows with its accepted drafts. `no drain`: a pause leaves the last step of overlapped
        ones in SGLang's queue. `remembers`: ends in prefills are not told to the drafter. Another
        kind: none.
        """
        global _fault
        _fault = kind

    def asyncrl_drafted_for(self) -> list[str]:
        """Requests that the drafter follows."""
        own: Any = self._scheduler
        return sorted(own.draft_worker._drafter._row_of)

    def asyncrl_overlaps(self) -> bool:
        """Whether steps overlap, and those with drafts do."""
        own: Any = self._scheduler
        return bool(own.enable_overlap and own.draft_worker._overlap)


class FaultyDrawing(TreeDrawing):
    """Draws, or does something else."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._accepted_drafts = Counter[str]()
        self._trees: TokenTrees | None = None
        self._rng = np.random.default_rng(11)

    def __call__(self, logits: torch.Tensor, trees: TokenTrees, feed: Feed) -> Accepted:
        self._trees = trees
        accepted = super().__call__(logits, trees, feed)
        for name, count in zip(self._batch.ids, accepted.counts.tolist(), strict=True):
            self._accepted_drafts[name] += count - 1
        return accepted

    def _draw(self, logits: torch.Tensor, feed: Feed) -> LogitDraws:
        seeds, given = self._batch.seed, logits.clone()
        if _fault == "shifted seeds":
            shift = [self._accepted_drafts[name] for name in self._batch.ids]
            self._batch.seed = seeds + np.array(shift, np.uint64)
        try:
            drawn = super()._draw(logits, feed)
        finally:
            self._batch.seed = seeds
        if _fault == "argmax" and len(feed.tokens) > len(feed.counts):
            drawn.ids[:, 0] = given.argmax(1)
        if _fault in ("sglang's rule", "padded"):
            self._judge(given.double().softmax(1).numpy(), drawn)
        return drawn

    def _judge(self, p: np.ndarray, drawn: LogitDraws) -> None:
        """Put SGLang's choices in the place of draws (`tree_speculative_sampling_target_only`)."""
        trees = self._trees
        assert trees is not None
        for row, root in enumerate(roots(trees)):
            mine = slice(trees.offsets[row], trees.offsets[row + 1])
            tokens, parents = trees.tokens[mine].tolist(), trees.parents[mine].tolist()
            at = -1
            while at is not None:
                place = int(root) + 1 + at
                children = [node for node, parent in enumerate(parents) if parent == at]
                at, token = self._choose(p[place], children, tokens)
                drawn.ids[place, 0] = token

    def _choose(
        self, p: np.ndarray, children: list[int], tokens: list[int]
    ) -> tuple[int | None, int]:
        """The child that is accepted, and the token after a place."""
        coin, mass, left = self._rng.random(), 0.0, p.copy()
        for child in children:
            mass += p[tokens[child]]
            if coin <= mass:
                return child, tokens[child]
            left[tokens[child]] = 0.0
        left = left if left.sum() > 0 else p
        return None, int(self._rng.choice(len(p), p=left / left.sum()))


def _plant(drafts: Drafts, *args: Any) -> TokenTrees:
    trees = _PLANT(drafts, *args)
    return _padded(trees) if _fault == "padded" else trees


def _padded(trees: TokenTrees, copies: int = 3) -> TokenTrees:
    """Every row that drafts gets more children of its last token, all with token 0."""
    more = np.where(trees.counts > 1, copies, 0)
    at = np.repeat(trees.offsets[1:], more)

    def insert(values: np.ndarray, value: float) -> Any:
        return np.insert(values, at, value)

    return replace(
        trees,
        tokens=insert(trees.tokens, 0),
        parents=insert(trees.parents, -1),
        depths=insert(trees.depths, 1),
        path_probabilities=insert(trees.path_probabilities, 0.1),
        offsets=trees.offsets + np.append(0, np.cumsum(more)).astype(np.int32),
        counts=trees.counts + more.astype(np.int32),
        forked=trees.forked or bool(more.any()),
    )


def _streams(seeds: Any, places: Any, noise_seeds: Any) -> Streams:
    if _fault == "one place":
        places = np.zeros_like(places)
    return _STREAMS(seeds, places, noise_seeds)


def _stop(self: Any) -> None:
    """Stop as our scheduler does, or as SGLang's `in_place` pause alone does."""
    if _fault != "no drain":
        _STOP(self)
        return
    self.pause_generation(scheduler.PauseGenerationReqInput(mode="in_place"))
    self.cur_batch_for_debug = None


def _forget_drafts(self: Any, request: Any) -> None:
    if _fault != "remembers":
        _FORGET(self, request)


def _handle_server_args(self: Any, server_args: Any) -> None:
    _HANDLE(self, server_args)
    if OVERLAP_VARIABLE in os.environ:
        server_args.disable_overlap_schedule = False


def add_switch() -> None:
    """Have the calls and the parts above take the places of ours."""
    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (scheduler, "WorkerCalls", FaultyCalls),
        (scheduler, "TreeDrawing", FaultyDrawing),
        (drafting, "plant", _plant),
        (drawing, "Streams", _streams),
        (tree_drawing, "Streams", _streams),
        (_CLIENT, "stop", _stop),
        (_CLIENT, "_forget_drafts", _forget_drafts),
        (speculation.Algorithm, "handle_server_args", _handle_server_args),
    ]
    if STEADY_VARIABLE in os.environ:
        ticks = itertools.count(1)
        timer = partial(drafting.StepTimer, clock=lambda: _TICK * next(ticks))
        changes.append((drafting, "StepTimer", timer))
    for owner, name, ours in changes:
        setattr(owner, name, ours)
