"""YAML by PyYAML's safe loader, with bounded aliases and without duplicate keys.

The safe loader does not run code, but it keeps the last of two equal keys, expands aliases without
a limit (a file of 300 bytes can stand for gigabytes), and reads `010` as 8. This module refuses
each of these.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import ConfigError
from asyncrl.suggestions import shortened

MAX_BYTES = 256 * 1024
"""Largest size of a file. A configuration with every key set has about 5 KiB."""
MAX_VALUES = 20_000
"""Maximum number of values, with aliases expanded."""
MAX_DEPTH = 100
"""Maximum nesting of brackets: PyYAML's time grows with the square of the depth."""
_TOO_MANY = f"more than {MAX_VALUES:,} values, aliases written out"
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]*[0-9][0-9_]*")
"""`010`, which YAML 1.1 reads as 8, and `08`, which it reads as text."""
_UNREADABLE = (ValueError, OverflowError, LookupError, AttributeError)
"""Exceptions of PyYAML for `!!bool x`, `!!int ""`, `2026-13-45` and integers of 5,000 digits."""


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises FileNotFoundError, ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_BYTES // 1024} KiB, which no configuration needs; is "
                "it the right file?"
            )
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
    """Return the value of one YAML document; lists and mappings are never shared.

    Raises ConfigError if the text is not YAML, a key is duplicate or an alias expands to too much.
    The message begins with `source` and is at most a few lines long.
    """
    try:
        return _unshared(_value(text), itertools.count(1))
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_explain(error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {shortened(str(error))}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{source} is not valid YAML: it is nested too deeply, or an alias stands for the "
            "value that it is part of"
        ) from error


@functools.lru_cache(maxsize=8)
def _value(text: str) -> Any:
    """Return the value of one YAML document; a command reads a run's configuration many times."""
    return _Loader(text).get_single_data()


def dump_yaml(value: Any) -> str:
    """Write YAML that `parse_yaml` reads back as the same value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


_INTEGER = re.compile(r"(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_OWN_RULES = [("tag:yaml.org,2002:int", _INTEGER), ("tag:yaml.org,2002:float", _FLOAT)]


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return patterns of plain texts that stand for values, by their first character."""
    replaced = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
    rules = {
        first: [rule for rule in known if rule[0] not in replaced]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return rules | {first: rules.get(first, []) + _OWN_RULES for first in "-+.0123456789"}


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """PyYAML's safe dumper, which quotes what this module's loader would read as a number."""

    yaml_implicit_resolvers = _resolvers()


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the numbers of this module, without duplicate keys."""

    yaml_implicit_resolvers = _resolvers()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._checked: set[yaml.Node] = set()
        self._pairs = 0

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - PyYAML's name
        """Refuse brackets that are nested too deeply. Raises MarkedYAMLError."""
        if self.flow_level >= MAX_DEPTH:
            raise _refused(f"brackets are nested too deeply: over {MAX_DEPTH}", self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<` by the pairs that it stands for. Raises MarkedYAMLError for equal keys."""
        if node not in self._checked:  # afterwards its own keys may be there twice
            self._checked.add(node)
            _refuse_duplicates(node)
        super().flatten_mapping(node)
        self._pairs += len(node.value)
        if self._pairs > MAX_VALUES:
            raise _refused(_TOO_MANY, node.start_mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a node's value; convert PyYAML's other errors to MarkedYAMLError."""
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if is_plain and _LEADING_ZERO.fullmatch(node.value):
            raise _refused(
                f"the number {shortened(node.value, 40)} begins with 0, so YAML reads it as octal "
                "or as text; write it without the 0, or in quotes if it is text",
                node.start_mark,
            )
        try:
            return super().construct_object(node, deep=deep)
        except _UNREADABLE as error:
            text = node.value if isinstance(node, yaml.ScalarNode) else node.tag
            raise _refused(
                f"{shortened(repr(text), 40)} cannot be read as a value: "
                f"{shortened(str(error), 80)}",
                node.start_mark,
            ) from error


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


def _unshared(value: Any, counted: Iterator[int]) -> Any:
    """Copy each alias's value, so that an override changes one place."""
    if next(counted) > MAX_VALUES:
        raise yaml.YAMLError(_TOO_MANY)
    if isinstance(value, dict):
        return {key: _unshared(inner, counted) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unshared(inner, counted) for inner in value]
    return value
