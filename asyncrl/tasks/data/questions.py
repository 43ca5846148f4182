"""Turns the rows of a dataset into questions, and refuses or leaves out unusable ones.

A question's id is the value of `task.id_field`, or else its row's number from 0, which counts the
rows that are left out, so that leaving out a row does not change other ids.

The user's `task.map` runs in a separate process, with a time limit for each example. Its input is a
temporary file with all examples, so neither side waits for the other to read.
"""

import contextlib
import logging
import math
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import DataError
from asyncrl.suggestions import shortened, written
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.data.map_worker import Answer, Failed, Load, Loaded, Mapped
from asyncrl.tasks.data.sources import BadRow, Row, checked, read_rows
from asyncrl.tasks.prompts import Messages, Question
from asyncrl.tasks.supervised import ProcessEnded, SupervisedProcess
from asyncrl.user_code.streams import Refused, pack

IMPORT_SECONDS = 60.0
MAX_PROCESSES = 64

_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def mapped_rows(
    rows: Sequence[Row | BadRow], name: str, *, seconds: float
) -> Generator[Row | BadRow | None, None, None]:
    """Apply the function to each row, in order; yield None for a row that it leaves out.

    A row is a `BadRow` if the function fails or returns an invalid value, or if it was bad before.
    `name` is as in `task.map`, `seconds` the time limit of one row. Raises DataError if the
    function cannot be loaded, takes too long, or ends its process.
    """
    with tempfile.TemporaryFile() as examples:
        examples.write(pack(Load(name, str(Path.cwd()))))
        for row in rows:
            if isinstance(row, Row):
                examples.write(pack(row.values))
        examples.seek(0)
        module, file = "asyncrl.tasks.data.map_worker", examples.fileno()
        with contextlib.closing(SupervisedProcess(module, MAX_PROCESSES, file)) as process:
            who = f"task.map {name!r}, while it was imported,"
            loaded = _answer(process, IMPORT_SECONDS, who, "a fixed limit")
            if isinstance(loaded, Refused):
                raise DataError(loaded.message)
            if not isinstance(loaded, Loaded):
                raise DataError(f"task.map {name!r} wrote to its process's pipes")
            for row in rows:
                yield _mapped(row, name, process, seconds) if isinstance(row, Row) else row


def _mapped(row: Row, name: str, process: SupervisedProcess, seconds: float) -> Row | BadRow | None:
    who = f"{row.where}: task.map {name!r}"
    answer = _answer(process, seconds, who, "its limit for one example")
    if isinstance(answer, Failed):
        unread = "".join(f"\nIts {column!r} {why}" for column, why in row.unread.items())
        return BadRow(row.where, f"task.map {name!r} {answer.message}{unread}")
    if not isinstance(answer, Mapped):
        raise DataError(f"{row.where}: task.map {name!r} wrote to its process's pipes")
    if answer.values is None:
        return None
    result = checked(row.where, answer.values, row.unread)
    if isinstance(result, BadRow):
        return replace(result, reason=f"what task.map {name!r} made of it: {result.reason}")
    return result


def _answer(process: SupervisedProcess, seconds: float, who: str, limit: str) -> Answer:
    """Return the next answer within `seconds`. A DataError starts with `who`, names `limit`."""
    try:
        frame = process.frame(seconds)
        if frame is None:
            raise DataError(f"{who} did not return within {seconds:g} s ({limit}) and was killed")
        return _DECODER.decode(frame)
    except ProcessEnded as ended:
        raise DataError(f"{who}: its process {ended}") from ended
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DataError(f"{who} wrote to its process's pipes: {error}") from error


log = logging.getLogger(__name__)

MAP_SECONDS = 10.0
MAX_ID = 200

_PLACES = 3


class UnusableError(Exception):
    """A row cannot be used; the message says why."""


def read_questions(
    config: TaskConfig, path: str, split: str, *, setting: str, prefix: str = ""
) -> list[Question]:
    """Read the questions of one dataset, in order.

    `path` is a file, a folder or a hub id, and `split` belongs to a saved folder or a hub dataset.
    `setting` is the key of `path`, for errors, and `prefix` is put before every id. Raises
    DataError if the dataset cannot be read or does not have a usable example, or, with `on_bad_row:
    refuse`, if an example is unusable.
    """
    reading = _Reading(config, prefix, setting.rpartition(".")[0])
    found = read_rows(path, split, config.subset, setting=setting)
    rows: Generator[Row | BadRow | None, None, None] = found
    if config.map is not None:
        rows = mapped_rows(list(found), config.map, seconds=MAP_SECONDS)
    with contextlib.closing(rows):
        for index, row in enumerate(rows):
            if row is None:
                reading.left_out += 1
            else:
                reading.add(index, row)
    return reading.finish(path, setting)


@dataclass(slots=True)
class _Reading:
    """The questions so far, and the rows that were left out."""

    config: TaskConfig
    prefix: str
    section: str
    questions: list[Question] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    bad_count: int = 0
    left_out: int = 0
    places: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    """Columns that were left out of rows, with the first place and the reason."""

    def add(self, index: int, row: Row | BadRow) -> None:
        """Keep the row's question, or refuse or count the row."""
        if isinstance(row, Row):
            try:
                question = self._question(index, row)
                before = self.places.setdefault(question.prompt_id, row.where)
                if before != row.where:
                    raise UnusableError(
                        f"{self.section}.id_field {self.config.id_field!r} must be unique, but "
                        f"{question.prompt_id!r} is also at {before}"
                    )
            except UnusableError as error:
                row = BadRow(row.where, str(error))
            else:
                self.questions.append(question)
                for name, why in row.unread.items():
                    self.unread.setdefault(name, f"{row.where}: it {why}")
                return
        if self.config.on_bad_row == "refuse":
            # If all earlier rows were unusable too, the mistake is probably in the configuration.
            hint = "; or leave such rows out with task.on_bad_row: skip" if self.questions else ""
            raise DataError(f"{row.where}: {row.reason}{hint}")
        self.bad_count += 1
        if self.bad_count <= _PLACES:
            self.bad.append(row)

    def _question(self, index: int, row: Row) -> Question:
        config, section = self.config, self.section
        content = plain_prompt(column_of(row, config.prompt_field, f"{section}.prompt_field"))
        answer = None
        if config.answer_field is not None:
            answer = column_of(row, config.answer_field, f"{section}.answer_field")
            if isinstance(answer, int | float) and not isinstance(answer, bool):
                if not math.isfinite(answer):
                    raise UnusableError(f"{config.answer_field!r} is {answer}, not a finite number")
                answer = str(answer)
        identity = str(index)
        if config.id_field is not None:
            identity = _identity(row, config.id_field, f"{section}.id_field")
        example = {"prompt": _plain_text(content), "answer": answer, "row": row.values}
        return Question(self.prefix + identity, content, example, row.where)

    def finish(self, path: str, setting: str) -> list[Question]:
        """Return the questions and warn about rows left out. Raises DataError if there are none."""
        if not self.questions and self.bad:
            raise DataError(
                f"{setting}: no example of {path} can be used; {self.bad_count:,} were left out "
                f"(task.on_bad_row: skip), the first at {self.bad[0].where}: {self.bad[0].reason}"
            )
        if not self.questions:
            none = f"task.map left out all {self.left_out:,}" if self.left_out else "there are no"
            raise DataError(f"{setting}: {path}: {none} examples")
        for name, first in self.unread.items():
            text = "the column %r is left out of rows of %s that cannot have it, first at %s"
            log.warning(text, name, path, first)
        if self.left_out:
            text = "task.map %r left out %d examples of %s"
            log.warning(text, self.config.map, self.left_out, path)
        if self.bad:
            listed = "; ".join(f"{bad.where}: {shortened(bad.reason)}" for bad in self.bad)
            ids = "the values of task.id_field" if self.config.id_field else "the row numbers"
            listed += "; ..." if self.bad_count > len(self.bad) else ""
            text = "left out %d of %d examples of %s (task.on_bad_row: skip): %s. Ids stay %s"
            total = self.bad_count + self.left_out + len(self.questions)
            log.warning(text, self.bad_count, total, path, listed, ids)
        return self.questions


def _identity(row: Row, name: str, setting: str) -> str:
    value = column_of(row, name, setting)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        got = written(value, 40)
        raise UnusableError(f"{setting} {name!r} must be a text or an integer, got {got}")
    text = str(value)
    if len(text) > MAX_ID:
        raise UnusableError(f"the id has {len(text):,} characters, more than {MAX_ID}")
    return text


def column_of(row: Row, name: str, setting: str) -> Any:
    """Return a column, named by a setting. Raises UnusableError if it is missing or null."""
    values = row.values
    value = values.get(name)
    if name in row.unread and name not in values:
        raise UnusableError(f"its {name!r} ({setting}) {row.unread[name]}")
    if value is None and name in values:
        raise UnusableError(f"its {name!r} ({setting}) is null")
    if value is None:
        there = shortened(", ".join(repr(key) for key in values)) or "none"
        remedy = f"{setting} must name one of its fields ({there})"
        raise UnusableError(f"the example has no {name!r}; {remedy}")
    return value


def plain_prompt(content: Any, noun: str = "prompt") -> str | Messages:
    """Return the prompt as a text or as messages whose content is text. Raises UnusableError.

    `noun` is what errors call it.
    """
    if isinstance(content, str):
        if not content.strip():
            raise UnusableError(f"the {noun} is empty")
        return content
    if not isinstance(content, list) or not content:
        raise UnusableError(
            f"the {noun} must be a text or a list of chat messages with role and content, got "
            f"{type(content).__name__}"
        )
    return [_message(place, one, noun) for place, one in enumerate(content)]


def _message(place: int, message: Any, noun: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnusableError(
            f"message {place} of the {noun} must have role and content, got {written(message, 80)}"
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""  # as OpenAI's clients write it
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnusableError(
                f"message {place} of the {noun} has a part that is not text ({kind})"
            )
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UnusableError(
            f"the content of message {place} of the {noun} must be a text or a list of text "
            f"parts, got {type(content).__name__}"
        )
    return {**message, "content": content}


def _plain_text(content: str | Messages) -> str:
    """Return the question without a template: the text itself, or the last user message."""
    if isinstance(content, str):
        return content
    asked = [message["content"] for message in content if message["role"] == "user"]
    return str(asked[-1] if asked else content[-1]["content"])
