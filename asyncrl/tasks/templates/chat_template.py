"""Renders a tokenizer's chat template in a separate process.

A template is a program that came with the model, so it is rendered by
`asyncrl.tasks.templates.worker` with limits of time, memory and text. All templates of this process
share one such process, which starts with the first rendering and ends when it has been idle.
"""

import atexit
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.errors import RenderingError
from asyncrl.monitoring.terminal.formatting import without_controls
from asyncrl.tasks.supervised import ProcessEnded, SupervisedProcess
from asyncrl.tasks.templates.messages import Answer, Failed, Limits, Render
from asyncrl.user_code.streams import MAX_FRAME, pack

Message = dict[str, Any]
"""A chat message: `role`, `content`, and other fields of the template (`tool_calls`)."""
Tools = Sequence[dict[str, Any]]

LIMITS = Limits()
WAIT_SECONDS = 120.0
"""Time limit of one rendering; the limit of its processor time is much lower."""
IDLE_SECONDS = 60.0
"""Idle time after which the rendering process ends: a controller renders only at the start."""
MAX_PROCESSES = 4
"""Limit of processes and threads of the rendering process, which needs one."""
_BATCH, _BATCH_BYTES = 64, 1 << 20
"""Limits of one message: conversations, and bytes unless one conversation has more."""

_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class ChatTemplate:
    """Renders messages; `arguments` are further variables of the template."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})

    def render(
        self, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool = True
    ) -> str:
        """Render a conversation, by default up to the answer. Raises RenderingError."""
        try:
            (text,) = self._texts([messages], tools, generation_prompt)
        except RenderingError as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise RenderingError(
                f"the model's chat template refused a conversation of the roles {roles}: {error}. "
                "Answer the model in roles that its template knows, or give the model directory "
                "another chat_template.jinja"
            ) from error
        return text

    def texts(
        self, conversations: Iterable[Sequence[Message]], *, generation_prompt: bool = True
    ) -> Iterator[str]:
        """Render conversations, by default up to the answer. Raises RenderingError (the line)."""
        return self._texts(conversations, None, generation_prompt)

    def _texts(
        self, conversations: Iterable[Sequence[Message]], tools: Tools | None, prompt: bool
    ) -> Iterator[str]:
        given = list(tools) if tools else None
        try:
            source = self._tokenizer.get_chat_template(tools=given)
        except ValueError as error:  # several templates, none of them the usual one
            raise RenderingError(str(error)) from error
        variables = {"documents": None, **self._tokenizer.special_tokens_map, **self._arguments}
        variables |= {"tools": given, "add_generation_prompt": prompt}
        return _RENDERER.texts(_pickled((source, variables)), conversations)


class _Renderer:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[..., threading.Timer] = threading.Timer,
    ) -> None:
        self._clock = clock
        self._timer = timer
        self._lock = threading.Lock()
        self._process: SupervisedProcess | None = None
        self._owner = 0
        """The process that started it: a forked process starts its own renderer."""
        self._used = 0.0

    def texts(self, template: bytes, conversations: Iterable[Sequence[Message]]) -> Iterator[str]:
        """Yield rendered texts. Raises RenderingError at the first failing conversation."""
        batch: list[bytes] = []
        size = 0
        for messages in conversations:
            try:
                if not messages:
                    raise RenderingError("there are no messages")
                one = _pickled(list(messages))
            except RenderingError:
                yield from self._batch(template, batch)
                raise
            if len(batch) == _BATCH or size + len(one) > _BATCH_BYTES:
                yield from self._batch(template, batch)
                batch, size = [], 0
            batch.append(one)
            size += len(one)
        yield from self._batch(template, batch)

    def close(self) -> None:
        """End the process, if it is running."""
        with self._lock:
            self._close()

    def _batch(self, template: bytes, conversations: list[bytes]) -> Iterator[str]:
        if not conversations:
            return
        frame = pack(Render(LIMITS, template, conversations))
        if len(frame) > MAX_FRAME:
            raise RenderingError(f"the messages have {len(frame) >> 20} MiB")
        with self._lock:
            try:
                answers = self._answers(frame, len(conversations))
            except BaseException:
                self._close()
                raise
        for answer in answers:
            if isinstance(answer, Failed):
                at = "" if answer.line is None else f"line {answer.line}: "
                raise RenderingError(at + without_controls(answer.message))
            yield answer.text.decode("utf-8", "surrogatepass")

    def _answers(self, frame: bytes, count: int) -> list[Answer]:
        """Return `count` answers, or fewer if the last one is a failure."""
        answers: list[Answer] = []
        process, fresh = self._started()
        self._used = self._clock()
        try:
            came = process.send(frame, WAIT_SECONDS)
            while came and len(answers) < count:
                answer = process.frame(WAIT_SECONDS)
                if answer is None:
                    break
                answers.append(_DECODER.decode(answer))
                if isinstance(answers[-1], Failed):
                    return answers
            if len(answers) == count:
                return answers
            failure = f"it did not answer within {WAIT_SECONDS:g} s"
        except ProcessEnded as ended:
            failure = f"its process {ended}"
            if ended.exit_code == -signal.SIGVTALRM:
                failure = f"it takes more than {LIMITS.seconds:g} s of processor time"
            elif not fresh and not answers:  # it may have ended before it was asked
                self._close()
                return self._answers(frame, count)
        except (msgspec.MsgspecError, ValueError) as error:
            failure = f"its process wrote what is not an answer: {error}"
        self._close()
        return [*answers, Failed(failure)]

    def _started(self) -> tuple[SupervisedProcess, bool]:
        if self._process is not None and self._owner == os.getpid():
            return self._process, False
        self._owner = os.getpid()
        self._process = SupervisedProcess("asyncrl.tasks.templates.worker", MAX_PROCESSES)
        self._look_later(self._process, IDLE_SECONDS)
        return self._process, True

    def _look_later(self, process: SupervisedProcess, seconds: float) -> None:
        timer = self._timer(seconds, self._look, [process])
        timer.daemon = True
        timer.start()

    def _look(self, process: SupervisedProcess) -> None:
        with self._lock:
            if self._process is not process:
                return
            idle = self._clock() - self._used
            if idle >= IDLE_SECONDS:
                self._close()
            else:
                self._look_later(process, IDLE_SECONDS - idle)

    def _close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.close()
        self._process = None


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # what stands in a message may be of any class
        raise RenderingError(f"a value cannot be given to the template: {error}") from error


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)
