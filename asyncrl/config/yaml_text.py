"""Read YAML that may be hostile: bounded in size, nesting and aliases, and without duplicate keys.

PyYAML's safe loader runs no code, but it keeps the last of two equal keys, expands aliases without
a limit (a file of 300 bytes can stand for gigabytes), recurses as deep as the text nests, and reads
`010` as 8. Here each of these is refused with its line.

Numbers are those of YAML 1.2, and `100_000`: `1e-3` is one, and `12:30:45` and `2026-11-28` are
texts, where PyYAML reads a text, 45045 and a date. `dump_yaml` writes what is read back unchanged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import ConfigError
from asyncrl.suggestions import shortened

MAX_BYTES = 256 * 1024
"""Largest size of a document. A configuration with every key set has about 5 KiB."""
MAX_DEPTH = 32
"""Most levels of nesting, aliases included."""
MAX_VALUES = 20_000
"""Most keys and values, each alias counted as what it stands for."""

_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]*[0-9][0-9_]*")

_UNREADABLE = (ValueError, OverflowError, LookupError, AttributeError)
"""What PyYAML raises for `!!bool x`, `!!int ""`, `2026-13-45` and integers of 5,000 digits."""


def read_yaml(path: Path) -> Any:
    """The value of a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it cannot be read, is too long, or is refused by `parse_yaml`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); save the configuration as "
            "UTF-8 text"
        ) from error
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, *, source: str) -> Any:
    """The value of one YAML document, where no two places share a list or mapping.

    Raises:
        ConfigError: it is not YAML, too long, nested too deeply, has a key twice or an alias that
            stands for too much. The message begins with `source` and is at most a few lines long.
    """
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise ConfigError(
            f"{source} has more than {MAX_BYTES // 1024} KiB, which no configuration needs; is it "
            "the right file?"
        )
    try:
        return _unshared(_Loader(text).get_single_data())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_explain(error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {shortened(str(error))}") from error


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back as the same value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


_INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_OWN_RULES = ("int", "float", "timestamp")


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Which plain texts stand for which values, by their first character."""
    own = {f"tag:yaml.org,2002:{name}" for name in _OWN_RULES}
    rules = {
        first: [rule for rule in known if rule[0] not in own]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        rules[first] = [
            *rules.get(first, []),
            ("tag:yaml.org,2002:int", re.compile(rf"(?:{_INTEGER.pattern})$")),
            ("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})$")),
        ]
    return rules


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes what this module's loader would read as a number."""

    yaml_implicit_resolvers = _resolvers()


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the limits and the numbers of this module."""

    yaml_implicit_resolvers = _resolvers()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}
        """Values and levels of each composed node, each alias counted as what it stands for."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node. Raises MarkedYAMLError where a limit is exceeded."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        self._level += 1
        if self._level > MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} levels deep", mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        if isinstance(event, yaml.AliasEvent) and node not in self._extents:
            raise _refused("an alias stands for the value that it is part of", mark)
        if node is not None:
            self._measure(node, mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node. Raises MarkedYAMLError also where PyYAML raises another error."""
        if isinstance(node, yaml.ScalarNode):
            _refuse_leading_zero(node)
        try:
            return super().construct_object(node, deep=deep)
        except _UNREADABLE as error:
            text = node.value if isinstance(node, yaml.ScalarNode) else node.tag
            raise _refused(
                f"{shortened(repr(text), 40)} cannot be read as a value: "
                f"{shortened(str(error), 80)}",
                node.start_mark,
            ) from error

    def _measure(self, node: yaml.Node, mark: yaml.Mark) -> None:
        if node not in self._extents:  # otherwise it was reached by an alias
            inner = [self._extents[child] for child in _children(node)]
            values = 1 + sum(values for values, _ in inner)
            self._extents[node] = values, 1 + max((levels for _, levels in inner), default=0)
            if isinstance(node, yaml.MappingNode):
                _refuse_duplicates(node)
        values, levels = self._extents[node]
        if values > MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES:,} values, aliases written out", mark)
        if levels + self._level > MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} levels deep, aliases written out", mark)


def _children(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return (part for pair in node.value for part in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _refuse_leading_zero(node: yaml.ScalarNode) -> None:
    """Refuse `010`, which YAML 1.1 reads as 8, and `08`, which it reads as text."""
    if node.style is None and _LEADING_ZERO.fullmatch(node.value):
        raise _refused(
            f"the number {shortened(node.value, 40)} begins with 0, so YAML reads it as octal or "
            "as text; write it without the 0, or in quotes if it is text",
            node.start_mark,
        )


def _refuse_duplicates(node: yaml.MappingNode) -> None:
    seen: dict[tuple[str, str], yaml.Mark] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        first = seen.get((key.tag, key.value))
        if first is not None:
            raise _refused(
                f"the key {shortened(key.value, 40)!r} is also on line {first.line + 1}; keep one "
                "of the two",
                key.start_mark,
            )
        seen[key.tag, key.value] = key.start_mark


def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _explain(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    parts = (error.context, error.problem)
    return place + ", ".join(shortened(part) for part in parts if part)


def _unshared(value: Any) -> Any:
    """A copy in which each alias has a value of its own, so that an override changes one place."""
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unshared(inner) for inner in value]
    return value
