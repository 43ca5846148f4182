"""The exchange of one sample with its environment. Pure.

`ProcessEnds` decides whether a sample is at fault when its environment's process ends. A process
serves many samples at once, so its end alone does not show which of them caused it:

    one call was in progress      that sample is at fault, once: a death
    several were                  each is a suspect: its calls run alone until as many turns are
                                  answered as its environment had received, even if the sample
                                  starts over. So the one at fault ends a process alone
    none was                      no sample is known to be at fault

An end is explained once a sample is known to be at fault for it, and then counts for no other one.
A sample's deaths are bounded, and so are its unexplained ends (between calls, or with a delay).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.environments.protocol import FailureReason, Traits
from asyncrl.environments.workers.lane import ProcessEnd, SessionLost
from asyncrl.environments.workers.pool import Session
from asyncrl.rollout.trajectory import BoolArray, IntArray, TrajectoryBuilder

MAX_UNEXPLAINED = 50
"""Bound of ends without a sample at fault; more count as a failure."""


@dataclass(slots=True)
class ProcessEnds:
    """Process ends of one sample."""

    count: int = 0
    deaths: int = 0
    _alone_until: int | None = None
    """Answered turns until its calls may run with others; 0: it must be opened."""
    _open: list[ProcessEnd] = field(default_factory=list)
    """Ends that were unexplained when last checked."""
    _suspected: list[ProcessEnd] = field(default_factory=list)
    """Open ends that a call of this sample may have caused."""

    @property
    def alone(self) -> bool:
        """True if its calls run alone in their process."""
        return self._alone_until is not None

    @property
    def unexplained(self) -> int:
        """Number of ends for which no sample is known to be at fault."""
        return sum(not end.explained for end in self._open)

    def note(self, lost: SessionLost, given: int) -> None:
        """Note a process end; the session had received `given` turns, one in progress included."""
        self.count += 1
        self._open = [end for end in (*self._open, lost.end) if not end.explained]
        self._suspected = [end for end in self._suspected if not end.explained]
        if lost.suspects:
            self._suspected.append(lost.end)
            self._alone_until = max(given, self._alone_until or 0)
        if lost.suspects == 1:
            self.deaths += 1
            self.explain()

    def fault(self, lost: SessionLost, max_attempts: int) -> tuple[FailureReason, str] | None:
        """Return why the sample has now failed, with a sentence, if it has."""
        if lost.suspects == 1 and lost.too_many:
            return "too_many_processes", str(lost)
        if self.deaths >= max_attempts:
            return "died", str(lost)
        if self.unexplained > MAX_UNEXPLAINED:
            return "died", (
                f"{lost}. That was process number {self.unexplained} that ended under this sample "
                "with no sample known to be at fault: the environment ends its process between "
                "calls, with a delay, or only under several samples at once"
            )
        return None

    def explain(self) -> None:
        """Explain the suspected ends: this sample is at fault for them."""
        for end in self._suspected:
            end.explained = True

    def answered(self, turns: int) -> None:
        """Note the number of answered turns of the session; 0 once it was opened."""
        if self._alone_until is not None and turns >= self._alone_until:
            self._alone_until = None

    def forget(self) -> None:
        """Forget earlier failures, but not whether it is a suspect."""
        self.count = self.deaths = 0
        self._open.clear()
        self._suspected.clear()


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy and its answer."""

    action: IntArray
    """`[T]`."""
    message: dict[str, Any]
    done: bool
    reward: float
    observed: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[N]`; empty after the last turn."""
    answer: list[dict[str, Any]] = field(default_factory=list)
    begins_context: bool = False
    """True if `observed` is a whole prompt: earlier messages changed, or another conversation."""
    tools: list[dict[str, Any]] | None = None
    """Tools of a conversation that begins with the answer; None if the current one continues."""

    @property
    def end(self) -> tuple[bool, float, bool, list[dict[str, Any]] | None]:
        """Facts that an environment with the same answer repeats, besides the tokens."""
        return self.done, self.reward, self.begins_context, self.tools

    def is_recorded_as(self, recorded: IntArray, *, begins: bool) -> bool:
        """Return True if its answer is that of a resumed sample."""
        is_same = self.begins_context == begins and np.array_equal(self.observed, recorded)
        return is_same and not self.done

    def says_the_same_as(self, other: Turn, *, in_ids: bool) -> bool:
        """Return True if an environment gave the same answer to a turn twice.

        Their tokens may differ: the chat template's behaviour is learned in the course of a run.
        """
        same = np.array_equal(self.observed, other.observed)
        return self.end == other.end and (same or (not in_ids and self.answer == other.answer))

    def used_tokens(self, builder: TrajectoryBuilder) -> int:
        """Return the used part of `sampling.max_tokens` once its answer follows these tokens."""
        if self.begins_context:
            return len(self.observed) - len(builder.prompt_tokens)
        return builder.used_tokens + len(self.observed)


@dataclass(slots=True)
class Episode:
    """The environment's side of a sample; see `environment_turns`. It does no I/O."""

    seed: int
    """Seed of the environment; the same whenever the sample is generated."""
    on_start_over: Callable[[], None] = lambda: None
    turn_limit: int | None = None
    """`environment.max_turn_tokens`."""
    opened: bool = False
    row_prompt: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[P]`."""
    prompt: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[P]` tokens of the answer to `reset`; empty if the row's own prompt is used."""
    conversation: list[dict[str, Any]] = field(default_factory=list)
    traits: Traits = field(default_factory=Traits)
    turns: list[Turn] = field(default_factory=list)
    """Answered turns, in order; those of the sample's text begin with them."""
    session: Session | None = None
    given: list[IntArray] = field(default_factory=list)
    """Actions that the session has received and not gone back from; the last may have failed."""
    failed_after: list[IntArray] | None = None
    """Actions after which the environment failed, so the sample's reward is 0; None if it has not.
    Empty if it could not be created."""
    unscored: bool = False
    """True if the failure reveals nothing about the policy."""
    ends: ProcessEnds = field(default_factory=ProcessEnds)
    _spoken: Spoken | None = None

    @property
    def failed(self) -> bool:
        """True if the environment has failed."""
        return self.failed_after is not None

    @property
    def goes_back(self) -> bool:
        """True if it can go back to before any turn, whatever the turns were.

        So one that goes back by `restore` counts even once it has failed and cannot (a call of it
        hangs, its process ended repeatedly); the sample starts over if a turn is rejected.
        """
        if self.traits.replay is not None:
            return True
        if self.failed:
            return self.traits.restores or not self.opened
        return self.traits.restores and self.session is not None and not self.session.lost

    @property
    def max_turn_tokens(self) -> int | None:
        """Longest next turn, which only an environment that cannot go back may lower."""
        own = None if self.session is None else self.session.max_turn_tokens
        return min((one for one in (self.turn_limit, own) if one is not None), default=None)

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    def before(self, turn: int) -> list[dict[str, Any]]:
        """Return the conversation before this turn (from 0)."""
        begun = (place for place in reversed(range(turn)) if self.turns[place].tools is not None)
        place = next(begun, -1)
        first = self.conversation if place < 0 else self.turns[place].answer
        later = self.turns[place + 1 : turn]
        return [*first, *(said for one in later for said in (one.message, *one.answer))]

    def tools_before(self, turn: int) -> list[dict[str, Any]]:
        """Return the tools of the conversation of this turn (from 0)."""
        begun = (one.tools for one in reversed(self.turns[:turn]) if one.tools is not None)
        return next(begun, self.traits.tools)

    def seen_before(self, turn: int) -> IntArray:
        """Return `[N]`, the context that this turn (from 0) was drawn in."""
        parts = [self.prompt if len(self.prompt) else self.row_prompt]
        for one in self.turns[:turn]:
            if one.begins_context:
                parts.clear()
            else:
                parts.append(one.action)
            parts.append(one.observed)
        return np.concatenate(parts)

    def context_length(self, turn: int, prompt: int) -> int:
        """Return the number of tokens that the policy read before this turn (from 0)."""
        length = prompt
        for one in self.turns[:turn]:
            before = 0 if one.begins_context else length + len(one.action)
            length = before + len(one.observed)
        return length

    def keep_answered(self, actions: list[IntArray]) -> int:
        """Forget turns and a failure after other actions. Returns how many turns are left.

        Known actions are replaced by the same arrays, which `common` need not compare.
        """
        answered = [turn.action for turn in self.turns]
        known = common(answered, actions)
        actions[:known] = answered[:known]
        del self.turns[known:]
        after = self.failed_after
        if after is not None and common(after, actions) < len(after):
            self._forget_failure()
        return known

    def said(self, builder: TrajectoryBuilder) -> tuple[list[IntArray], list[IntArray]]:
        """Return the turns of a response so far, and the observations, at the end of a turn."""
        if self._spoken is None or self._spoken.builder is not builder:
            self._spoken = Spoken(builder)
        self._spoken.read()
        return self._spoken.actions, self._spoken.observations

    def lacks_answers(self, builder: TrajectoryBuilder) -> bool:
        """Return True if turns were answered before a resume, with rewards that are lost."""
        return len(self.turns) < len(actions_of(builder.tokens(), builder.observed())[1])

    def _forget_failure(self) -> None:
        self.failed_after, self.unscored = None, False
        self.ends.forget()

    def begin_again(self) -> None:
        """Forget the exchange; another session follows."""
        self.opened, self.prompt = False, np.empty(0, np.int32)
        self.turns.clear()
        if self.failed:
            self._forget_failure()
        self.close()
        self.on_start_over()

    def close(self) -> None:
        """End the session, if there is one."""
        session, self.session = self.session, None
        self.given.clear()
        self._spoken = None
        if session is not None:
            session.close()

    def finish(self) -> None:
        """Keep the session of a finished sample only if going back needs it, and it can."""
        session, needs_it = self.session, self.traits.replay is None and self.traits.restores
        if needs_it and session is not None and not session.lost:
            session.park()
            self._spoken = None
        else:
            self.close()


class Spoken:
    """The parts of a growing response, each read once: `read` is called where a turn has ended."""

    def __init__(self, builder: TrajectoryBuilder) -> None:
        self.builder = builder
        self._length = 0
        self.actions: list[IntArray] = []
        self.observations: list[IntArray] = []

    def read(self) -> None:
        """Read what has been appended since the last call."""
        tokens, observed = self.builder.tokens(), self.builder.observed()
        edge = observed[max(0, self._length - 1) : self._length + 1].tolist()
        if edge not in ([False], [False, True]):  # the last part has grown
            self._length = 0
        if not self._length:
            self.actions, self.observations = [], []
        runs = runs_of(tokens[self._length :], observed[self._length :])
        ours, theirs = (runs[::2], runs[1::2]) if not self._length else (runs[1::2], runs[::2])
        self.actions += [run.copy() for run in ours]  # otherwise each keeps all tokens in memory
        self.observations += [run.copy() for run in theirs]
        self._length = len(tokens)


def common(some: Sequence[IntArray], others: Sequence[IntArray]) -> int:
    """Return the length of the common beginning of two lists of actions."""
    count = 0
    for one, other in zip(some, others, strict=False):
        if one is not other and not np.array_equal(one, other):
            break
        count += 1
    return count


def actions_of(tokens: IntArray, observed: BoolArray) -> tuple[list[IntArray], list[IntArray]]:
    """Split a response into the policy's turns and the observations between them.

    >>> actions_of(np.array([1, 2, 9, 3], np.int32), np.array([0, 0, 1, 0], bool))
    ([array([1, 2], dtype=int32), array([3], dtype=int32)], [array([9], dtype=int32)])
    """
    runs = runs_of(tokens, observed)
    return runs[::2], runs[1::2]


def runs_of(tokens: IntArray, observed: BoolArray) -> list[IntArray]:
    """Split tokens where generated and observed ones meet."""
    if not len(tokens):
        return []
    edges = np.flatnonzero(observed[1:] != observed[:-1]) + 1
    return list(np.split(tokens, edges))
