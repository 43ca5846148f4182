"""Renders chat templates: `python -m asyncrl.tasks.templates.worker PARENT STATUS PROCESSES`.

A chat template is an untrusted jinja2 program. It runs here, below a supervisor like `task.map`,
with limits of processor time, memory and text for each rendering. transformers takes seconds to
import, so its rendering environment is reproduced here; a test compares the two.
"""

import contextlib
import functools
import json
import pickle
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from asyncrl.tasks.templates.messages import MAX_TEXT, Answer, Failed, Limits, Render, Rendered
from asyncrl.user_code.streams import Streams
from asyncrl.user_code.supervisor import supervise

_MAX_MESSAGE = 2000
_MIB = 1 << 20


class _OutOfTime(BaseException):
    """The time limit is exceeded. Templates cannot catch this."""


class _OutOfText(BaseException):
    """The text limit is exceeded. Templates cannot catch this."""


class _Generation(jinja2.ext.Extension):
    """Supports the tag `generation`, with which templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment in which transformers' `apply_chat_template` renders."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
        return datetime.now().strftime(format)  # noqa: DTZ005, TID251 - the day here

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


@functools.lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """Compile a template."""
    return environment().from_string(template)


def main() -> None:
    """Answer each conversation, in order."""
    parent, status, max_processes = map(int, sys.argv[1:])
    supervise(parent, status, max_processes)
    signal.signal(signal.SIGPROF, _out_of_time)
    streams = Streams()
    while (frame := streams.read()) is not None:
        for answer in _answers(msgspec.msgpack.decode(frame, type=Render)):
            streams.send(answer)


def _answers(asked: Render) -> Iterator[Answer]:
    with contextlib.suppress(ValueError, OSError):  # not on every system
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (asked.limits.memory, hard))
    for messages in asked.conversations:
        answer = _answer(asked.limits, asked.template, messages)
        yield answer
        if isinstance(answer, Failed):
            return


def _answer(limits: Limits, general: bytes, messages: bytes) -> Answer:
    try:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        # Python handles that signal only between its own steps; this one ends the process.
        signal.setitimer(signal.ITIMER_VIRTUAL, limits.seconds + 1)
        try:
            template, variables = _loaded(general)
            said = pickle.loads(messages)  # noqa: S301 - it comes from our own side
            return Rendered(_text(compiled(template), {**variables, "messages": said}))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _OutOfTime as error:
        return Failed(f"it takes more than {limits.seconds:g} s of processor time", _line(error))
    except _OutOfText as error:
        return Failed(f"it writes more than {MAX_TEXT // _MIB} MiB of text", _line(error))
    except MemoryError as error:
        return Failed(f"it takes more than {limits.memory // _MIB:,} MiB of memory", _line(error))
    except Exception as error:  # noqa: BLE001 - process edge: reported to the caller
        shown = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        return Failed(f"{shown}{error}"[:_MAX_MESSAGE], _line(error))


@functools.lru_cache(maxsize=1)
def _loaded(general: bytes) -> tuple[str, dict[str, Any]]:
    template, variables = pickle.loads(general)  # noqa: S301 - it comes from our own side
    return template, variables


def _text(template: jinja2.Template, variables: dict[str, Any]) -> bytes:
    parts, size = [], 0
    writing: Any = template.root_render_func(template.new_context(variables))
    for part in writing:
        parts.append(part)
        size += len(part)
        if size > MAX_TEXT:
            writing.throw(_OutOfText())  # where the template is, so that its line is known
    return "".join(parts).encode("utf-8", "surrogatepass")


def _line(error: BaseException) -> int | None:
    """Return the innermost line of the template that an exception comes from."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    found, trace = None, error.__traceback__
    while trace is not None:
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            found = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return found


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise _OutOfTime


if __name__ == "__main__":
    main()
