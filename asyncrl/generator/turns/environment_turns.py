"""Answers the turns of samples with their environments.

    turn ends ──► answer ──► observed tokens are appended, the next turn begins
                     │  └──► done, a limit, a failure: the sample ends
                     └─────► StartOver: the environment cannot go back

A session must have received exactly the turns before the one that it answers. If it has not, or its
process is gone, it goes back: by `restore`, else by replay, else the sample starts over.

A turn is followed by more of its conversation, or by another one, which is a separate context:

    q │ turn 1 │ o │ turn 2                      the environment begins another conversation
    r │ turn 3                                   and returns to the first one:
    q │ turn 1 │ o │ turn 2 │ o' │ turn 4

A conversation that begins like an earlier one continues it: its tokens up to the last common turn
are the earlier ones, generated turns included. They are observed now, since each of them is trained
on in the context in which it was drawn. With `environment.history: template`, or if nothing is
common, the chat template renders all of it.

Such a context follows from earlier turns and stays valid with them (`asyncrl.rollout.contexts`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.environments.chat_messages import mean_the_same
from asyncrl.environments.protocol import BadAnswerError, Message, Observation, StepResult
from asyncrl.environments.translation import Observed, Tools, Translation, is_ids
from asyncrl.environments.workers.lane import SessionLost
from asyncrl.environments.workers.pool import EnvironmentFailed, EnvironmentPool, Session
from asyncrl.generator.turns.conversation import Episode, Turn, common
from asyncrl.rollout.trajectory import FinishReason, IntArray
from asyncrl.user_code.pool import is_logged
from asyncrl.wire.messages.data import decode_tokens
from asyncrl.wire.records.step import EnvironmentCounts

if TYPE_CHECKING:
    from asyncrl.generator.sample_state import SampleGeneration

log = logging.getLogger(__name__)


def answered(turn: Turn, result: StepResult, episode: Episode, translation: Translation) -> Turn:
    """Add the environment's answer to a turn, unless the sample ends with it.

    `episode` is that up to this turn. Raises BadAnswerError for an answer that cannot be shown.
    """
    said = result.observation
    if result.done or said is None:
        return turn
    place = len(episode.turns)
    if not result.new_conversation:
        tools = episode.tools_before(place)
        observed = translation.observed(episode.before(place), said, turn.action, tools)
        return _with(turn, observed)
    own = episode.traits.tools if result.tools is None else result.tools
    begun = _continued(said, own, [*episode.turns, turn], episode, translation)
    return replace(_with(turn, begun or translation.begun(said, own)), tools=own)


def _with(turn: Turn, observed: Observed) -> Turn:
    tokens, messages, begins = observed
    return replace(turn, observed=tokens, answer=messages, begins_context=begins)


def _continued(
    said: Observation,
    tools: Tools,
    turns: Sequence[Turn],
    episode: Episode,
    translation: Translation,
) -> Observed | None:
    if is_ids(said) or not translation.keeps_history:
        return None
    messages = translation.conversation(said, {})  # type: ignore[arg-type]  # no ids
    translation.check_prompt(messages)
    common = _last_in_common(messages, tools, turns, episode)
    if common is None:
        return None
    place, count = common
    action = turns[place].action
    new = translation.between(episode.before(place), messages[count:], action, tools)
    if place == len(episode.turns):  # the present conversation grows
        return Observed(new, messages)
    tokens = np.concatenate([episode.seen_before(place), action, new])
    return Observed(tokens, messages, begins_context=True)


def _last_in_common(
    messages: Sequence[Message], tools: Tools, turns: Sequence[Turn], episode: Episode
) -> tuple[int, int] | None:
    """Return the newest turn with most messages in common with a conversation, and their number."""
    found: tuple[int, int] | None = None
    own = episode.traits.tools
    count = _in_common(messages, 0, episode.conversation)
    for place, turn in enumerate(turns):
        count = _in_common(messages, count, [turn.message])
        least, most = (0 if found is None else found[1]), len(messages) - 1
        if count is not None and least <= count <= most and own == tools:
            found = place, count
        if turn.tools is not None:
            own, count = turn.tools, 0
        count = _in_common(messages, count, turn.answer)
    return found


def _in_common(wanted: Sequence[Message], count: int | None, more: Sequence[Message]) -> int | None:
    if count is None or len(wanted) < count + len(more):
        return None
    pairs = zip(wanted[count:], more, strict=False)
    return count + len(more) if all(mean_the_same(*pair) for pair in pairs) else None


class StartOver(Exception):  # noqa: N818 - names the event
    """The environment cannot go back, so the sample begins again."""


class Episodes:
    """The environments of a generator's samples, with limits of responses and contexts."""

    def __init__(
        self, pool: EnvironmentPool, translator: Translation, *, max_tokens: int, max_model_len: int
    ) -> None:
        self._pool = pool
        self._translation = translator
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._counts = EnvironmentCounts()

    @property
    def counts(self) -> EnvironmentCounts:
        """Counts since the start."""
        return self._counts + self._pool.counts

    def new(self, generation: SampleGeneration) -> Episode:
        """Create the episode of a new sample. It shares no random number with the sampling."""
        text = f"environment {generation.environment_seed}".encode()
        digest = hashlib.blake2b(text, digest_size=7).digest()
        seed, prompt = int.from_bytes(digest, "little"), decode_tokens(generation.prompt.tokens)
        limit = self._pool.config.max_turn_tokens
        return Episode(seed, self._count_started_over, turn_limit=limit, row_prompt=prompt)

    def _count_started_over(self) -> None:
        self._counts += EnvironmentCounts(started_over=1)

    async def begin(self, generation: SampleGeneration) -> None:
        """Open the environment. Raises EnvironmentFailed if the run must end."""
        episode = _episode_of(generation)
        try:
            while not episode.opened:
                try:
                    await self._open(generation, episode)
                except SessionLost as lost:
                    self._note_loss(episode, lost)
        except EnvironmentFailed as error:
            self._fail(episode, error, [])

    async def answer(
        self, generation: SampleGeneration, cut_off: FinishReason | None = None
    ) -> FinishReason | None:
        """Answer the policy's ended turn.

        A sample cut off by `cut_off` ends so; only earlier turns with lost rewards are answered.

        Returns how the sample ends, or None: the observation was appended and another turn follows.
        Raises StartOver (see the class); EnvironmentFailed if `rewards.on_error` is `stop`.
        """
        episode, builder = _episode_of(generation), generation.builder
        actions, recorded = episode.said(builder)
        if cut_off is not None:
            actions = actions[: len(recorded)]
        try:
            while episode.keep_answered(actions) < len(actions):
                if episode.failed:
                    return cut_off or "stop"
                try:
                    await self._take_turn(generation, episode, actions, recorded)
                except SessionLost as lost:
                    self._note_loss(episode, lost)
        except EnvironmentFailed as error:
            self._fail(episode, error, actions)
            return cut_off or "stop"
        turn = episode.turns[-1]
        if turn.done or cut_off is not None:
            return cut_off or "stop"
        full = turn.used_tokens(builder) >= self._max_tokens
        if full or len(actions) >= self._pool.config.max_turns:
            return "length"
        append = builder.begin_context if turn.begins_context else builder.append_observed
        append(turn.observed)
        return None

    async def _take_turn(
        self,
        generation: SampleGeneration,
        episode: Episode,
        actions: list[IntArray],
        recorded: list[IntArray],
    ) -> None:
        session = await self._session(generation, episode)
        place = min(common(episode.given, actions), len(episode.turns))
        if place < len(episode.given):
            await self._go_back(episode, session, place)
            return
        action = actions[place]
        read = episode.context_length(place, len(generation.builder.prompt_tokens))
        episode.given.append(action)  # also if it fails
        result = await self._step(episode, session, place, read)
        if place < len(episode.turns):  # replayed
            self._check_replayed(episode, session, result, episode.turns[place])
            return
        turn = self._turn(episode, session, action, result)
        if place < len(recorded):
            start = sum(map(len, (*actions[: place + 1], *recorded[:place])))
            begins = start in generation.builder.contexts
            if not turn.is_recorded_as(recorded[place], begins=begins):
                with self._translation.renderer.other_way():
                    turn = self._turn(episode, session, action, result)
            if not turn.is_recorded_as(recorded[place], begins=begins):
                raise _not_deterministic(self._pool, session, "step")
        episode.turns.append(turn)

    async def _session(self, generation: SampleGeneration, episode: Episode) -> Session:
        """Return the session, a new one if its process is gone. Raises StartOver, SessionLost."""
        session = episode.session
        if session is not None and not session.lost:
            return session
        if session is not None and (end := session.process_end) is not None:
            self._note_loss(episode, SessionLost(end.how, end))  # between two calls
        episode.close()
        if episode.traits.replay is None:
            if session is not None or episode.ends.count:  # or it failed after a turn that is gone
                self._counts += _lost(generation, self._counts.lost + 1)
            raise StartOver
        self._counts += EnvironmentCounts(replayed=1)
        return await self._open(generation, episode)

    async def _go_back(self, episode: Episode, session: Session, turn: int) -> None:
        """Go back to before this turn. Raises StartOver, SessionLost."""
        if episode.traits.restores:
            await session.restore(turn, alone=episode.ends.alone)
            del episode.given[turn:]
            self._counts += EnvironmentCounts(restored=1)
        else:
            episode.close()

    async def _step(self, episode: Episode, session: Session, place: int, read: int) -> StepResult:
        tokens = episode.given[place]
        action = self._translation.action(tokens, episode.tools_before(place), place)
        action = replace(action, context_length=read)
        result = await session.step(action, alone=episode.ends.alone)
        episode.ends.answered(place + 1)
        if place >= len(episode.turns):  # not one that is replayed
            wrong = sum(bool(call.get("error")) for call in action.tool_calls)
            self._counts += EnvironmentCounts(calls=len(action.tool_calls), wrong_calls=wrong)
        return result

    async def _open(self, generation: SampleGeneration, episode: Episode) -> Session:
        row = generation.prompt.example
        session = await self._pool.open(
            row,
            episode.seed,
            example_id=generation.prompt.prompt_id,
            priority=lambda: generation.priority,
            alone=episode.ends.alone,
        )
        episode.session = session
        episode.ends.answered(0)
        conversation = self._translation.conversation(session.first, row)
        prompt = np.empty(0, np.int32)
        if session.first is not None or session.traits.tools:
            try:
                prompt = self._translation.prompt(conversation, session.traits.tools)
            except BadAnswerError as error:
                raise self._pool.failure(session, error.reason, "reset", str(error)) from error
        if not episode.opened:
            if len(prompt) + self._max_tokens > self._max_model_len:
                raise self._pool.failure(
                    session,
                    "too_long",
                    "reset",
                    f"the prompt has {len(prompt)} tokens; with sampling.max_tokens "
                    f"({self._max_tokens}) that is more than engine.max_model_len "
                    f"({self._max_model_len})",
                )
            episode.opened, episode.prompt = True, prompt
            episode.conversation, episode.traits = conversation, session.traits
        elif episode.traits.replay == "deterministic":
            said, before = (conversation, session.traits), (episode.conversation, episode.traits)
            if said != before and not np.array_equal(prompt, episode.prompt):
                raise _not_deterministic(self._pool, session, "reset")
        return session

    def _turn(
        self, episode: Episode, session: Session, action: IntArray, result: StepResult
    ) -> Turn:
        place = len(episode.turns)
        said = self._translation.action(action, episode.tools_before(place), place)
        turn = Turn(action, said.message, result.done, result.reward)
        try:
            return answered(turn, result, episode, self._translation)
        except BadAnswerError as error:
            raise self._pool.failure(session, error.reason, "step", str(error)) from error

    def _check_replayed(
        self, episode: Episode, session: Session, result: StepResult, before: Turn
    ) -> None:
        """Check the answer to a replayed turn: it must be the same, or is not used."""
        if episode.traits.replay != "deterministic":
            return
        place = len(episode.given) - 1
        earlier, episode.turns = episode.turns, episode.turns[:place]
        try:
            again = self._turn(episode, session, before.action, result)
        finally:
            episode.turns = earlier
        if not again.says_the_same_as(before, in_ids=is_ids(result.observation)):
            raise _not_deterministic(self._pool, session, "step")

    def _note_loss(self, episode: Episode, lost: SessionLost) -> None:
        own = f"environment {self._pool.config.name!r}"
        name = own if episode.session is None else episode.session.name
        episode.ends.note(lost, len(episode.given))
        episode.close()
        if (fault := episode.ends.fault(lost, self._pool.rewards.max_attempts)) is not None:
            reason, text = fault
            raise EnvironmentFailed(f"{name}: its process {text}", reason)

    def _fail(self, episode: Episode, error: EnvironmentFailed, actions: list[IntArray]) -> None:
        """Count a failure; the sample's reward is 0. Raises it if that ends the run.

        An agent that asks for more than the model reads is not the program's fault: what its tools
        return depends on the policy's turns. Such a sample ends, and the run continues.
        """
        self._pool.count(error)
        if error.reason == "timeout":
            episode.ends.explain()  # it blocked its process
        episode.failed_after = list(actions)  # those of the sample may grow
        episode.unscored = error.unscored or not actions
        episode.finish()
        is_agents = (self._pool.config.name or "").startswith("agent:")
        if is_agents and error.reason == "too_long" and actions:
            return
        if self._pool.rewards.on_error == "stop":
            raise error


def _lost(generation: SampleGeneration, count: int) -> EnvironmentCounts:
    if is_logged(count):
        log.warning(
            "sample %s starts over, number %d: the worker process of its environment has ended, "
            "and it cannot go back. It draws the same random numbers; if its environment answers "
            "differently, samples that take long become a little rarer (docs/exactness.md)",
            generation.sample,
            count,
        )
    return EnvironmentCounts(lost=1)


def _not_deterministic(pool: EnvironmentPool, session: Session, method: str) -> EnvironmentFailed:
    text = "the same row, seed and actions were answered differently, despite replay: deterministic"
    return pool.failure(session, "not_deterministic", method, text)


def _episode_of(generation: SampleGeneration) -> Episode:
    if generation.episode is None:
        raise RuntimeError(f"sample {generation.sample} has no environment")
    return generation.episode


async def or_deadline(work: asyncio.Task[FinishReason | None]) -> FinishReason | None:
    """Wait for an answer; `deadline` if it was cancelled because the sample's time is up."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if work.cancelled() and task is not None and not task.cancelling():
            return "deadline"
        work.cancel()
        raise
