"""Generates the reference of all settings from the Config classes."""

import functools
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from asyncrl.config.effects import EFFECTS, Idle, Place, without_effect
from asyncrl.config.run_config import RunConfig
from asyncrl.mutability import When, rule_of

Schema = Mapping[str, Any]
"""JSON schema of one field or one model, as pydantic writes it."""
Values = Mapping[str, Any]

_WIDTH = 100
_HUGE = 604_800
"""A bound that no user reaches: the page leaves out those from here on."""

_INTRODUCTION = """\
# Configuration

<!-- Generated from the Config classes: edit their docstrings, then run
     `python -m asyncrl.config.reference > docs/configuration.md`. -->

```bash
asyncrl run CONFIG --explain    # the whole configuration, with the meaning of each key
asyncrl run CONFIG --dry-run    # check and print all that a start does, and start nothing
```

A run is one YAML file with the sections below; every key may be left out. `--set section.key=value`
overrides a key, and its value is read as YAML (`--set trainer.betas='[0.9, 0.95]'`). What is wrong
is refused with the path of the key and what would be right, and so is a setting that has no effect
with the others; sections of other engines and launchers may stand, and `--explain` greys what has
no effect. A relative path starts at the current
directory; a file that is not there is looked for next to the YAML file.

The column *may change* says when a run that has begun may have another value:

| may change | how |
|---|---|
| (empty, or no column) | on resume: stop the run, then `--resume --set section.key=value` |
| at a step | `asyncrl set`, or `run.changes` in advance: from the next step that has not begun |
| live | `asyncrl set`, at once |
| never | that is another run |
"""

_MAY_CHANGE: dict[When, str] = {
    "next step": "at a step",
    "first step not begun": "at a step",
    "at once": "live",
    "resume": "on resume",
    "never": "never",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key that a user may set."""

    name: str
    values: str
    """Allowed values: the type or the choices, then the bounds."""
    default: str
    meaning: str
    condition: str = ""
    """The sentence that says when it has an effect; empty: always."""
    may_change: str = ""
    """`at a step`, `live`, `on resume` or `never`."""

    @property
    def summary(self) -> str:
        """Allowed values and default, on one line."""
        return f"{self.values}; default: {self.default}"


@dataclass(frozen=True, slots=True)
class Section:
    """A group of settings: one Config class at one place of the configuration."""

    path: str
    """Dotted path; `[]` stands for each entry of a list, `NAME` for each name of a mapping."""
    meaning: str
    """Docstring of the class and of the field that holds it. May have several paragraphs."""
    settings: tuple[Setting, ...]


@functools.cache
def sections(most: float = math.inf) -> tuple[Section, ...]:
    """Return every section, with bounds below `most`; a nested section follows its parent."""
    schema = RunConfig.model_json_schema()
    return tuple(
        section
        for name, field in schema["properties"].items()
        for section in _sections(name, field, schema["$defs"], most)
    )


def explain_config(config: RunConfig, grey: Callable[[str], str] = str, verb: str = "run") -> str:
    """Return the configuration as commented YAML; `load_config` reads it back."""
    idle = without_effect(config, verb)
    explained = _Explained({section.path: section for section in sections()}, idle, grey)
    lines: list[str] = []
    for name, values in config.model_dump(mode="json").items():
        if lines:
            lines.append("")
        lines += explained.section(name, values, (name,), indent="")
    return "\n".join(lines) + "\n"


def reference_page() -> str:
    """Return the text of docs/configuration.md."""
    described: dict[Setting, str] = {}
    pages = ("\n".join(_page_section(section, described)) + "\n" for section in sections(_HUGE))
    return "\n".join([_INTRODUCTION, *pages])


def _page_section(section: Section, described: dict[Setting, str]) -> Iterator[str]:
    """Yield the lines of a section; what its keys share stands above its table, once.

    A key that is `described` with the same words in an earlier section refers to that.
    """
    yield f"{'###' if '.' in section.path else '##'} `{section.path}`"
    yield from ("", section.meaning, "")
    changes = {setting.may_change for setting in section.settings}
    if changes == {"never"}:
        yield from ("None of these may change in a run that has begun.", "")
    names: dict[str, list[str]] = {}
    for setting in section.settings:
        names.setdefault(setting.condition, []).append(f"`{setting.name}`")
    shared = {condition: keys for condition, keys in names.items() if condition and len(keys) > 1}
    for condition, keys in shared.items():
        yield from (f"{condition.removesuffix('.')}: {', '.join(keys)}.", "")
    column = " may change |" if len(changes) > 1 else ""
    yield f"| key | values | default |{column} meaning |"
    yield f"|---|---|---|{'---|' if column else ''}---|"
    for setting in section.settings:
        may_change = f" {setting.may_change.replace('on resume', '')} |" if column else ""
        meaning = setting.meaning
        if setting.condition not in shared:
            meaning = f"{meaning} {setting.condition}".rstrip()
        earlier = described.setdefault(setting, section.path)
        if earlier != section.path:
            meaning = f"As in `{earlier}`."
        yield (
            f"| `{setting.name}` | {_cell(setting.values)} | `{setting.default}` "
            f"|{may_change} {_cell(meaning)} |"
        )


def _sections(path: str, field: Schema, models: Schema, most: float) -> Iterator[Section]:
    model: Schema = models[field["$ref"].rpartition("/")[2]]
    settings: list[Setting] = []
    nested: list[Section] = []
    for name, inner in model["properties"].items():
        if "$ref" in inner:
            nested += _sections(f"{path}.{name}", inner, models, most)
            continue
        settings.append(_setting(path, name, inner, most))
        if "$ref" in inner.get("items", {}):
            nested += _sections(f"{path}.{name}[]", inner["items"], models, most)
        entries = inner.get("additionalProperties", {})
        if isinstance(entries, Mapping) and "$ref" in entries:
            nested += _sections(f"{path}.{name}.NAME", entries, models, most)
    meaning = model.get("description", "").partition("\n\nExample:")[0]
    if "description" in field:
        meaning += "\n\n" + field["description"]
    yield Section(path, f"{meaning.strip()} {_only(path)}".strip(), tuple(settings))
    yield from nested


def _only(key: str) -> str:
    return f"Only {EFFECTS[key].when}." if key in EFFECTS else ""


def _setting(path: str, name: str, field: Schema, most: float) -> Setting:
    default = _yaml(field["default"]) if "default" in field else "none, it must be given"
    if "bytes" in name:
        default += f" ({field['default'] >> 20} MiB)"
    meaning, key = " ".join(field.get("description", "").split()), f"{path}.{name}"
    may_change = _MAY_CHANGE[rule_of(key).when]
    return Setting(name, _values(field, most), default, meaning, _only(key), may_change)


def _values(field: Schema, most: float) -> str:
    if "anyOf" in field:
        return ", or ".join(_values(choice, most) for choice in field["anyOf"])
    if "enum" in field:
        choices = [f"`{value}`" for value in field["enum"]]
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if "const" in field:
        return f"`{field['const']}`"
    return " ".join([_type(field), ", ".join(_bounds(field, most))]).strip()


def _type(field: Schema) -> str:
    if "prefixItems" in field:
        return f"[{', '.join(_type(item) for item in field['prefixItems'])}]"
    names = {"string": "text", "array": "list", "object": "mapping"}
    kind: str = field.get("type", "any value")
    return names.get(kind, kind)


def _bounds(field: Schema, most: float) -> Iterator[str]:
    lower = {"minimum": "≥", "exclusiveMinimum": ">"}
    for key, sign in (lower | {"maximum": "≤", "exclusiveMaximum": "<"}).items():
        if key in field and abs(field[key]) < most:
            bound = field[key]
            yield f"{sign} {bound:,.0f}" if bound == int(bound) else f"{sign} {bound:g}"
    if "pattern" in field:
        yield f"matching `{field['pattern']}`"
    if "minLength" in field or ("minItems" in field and "prefixItems" not in field):
        yield "(not empty)"


@dataclass(frozen=True, slots=True)
class _Explained:
    """The lines of `explain_config`; `at` is a section's place in the configuration."""

    known: Mapping[str, Section]
    idle: Mapping[Place, Idle]
    grey: Callable[[str], str]

    def section(self, path: str, values: Values, at: Place, indent: str) -> Iterator[str]:
        yield from _comment(self.known[path].meaning, indent)
        yield f"{indent}{at[-1]}:"
        yield from self.settings(path, values, at, indent + "  ")

    def settings(self, path: str, values: Values, at: Place, indent: str) -> Iterator[str]:
        settings = {setting.name: setting for setting in self.known[path].settings}
        for name, value in values.items():
            if name not in settings:
                yield from self.section(f"{path}.{name}", value, (*at, name), indent)
                continue
            lines = self.setting(path, settings[name], value, at, indent)
            if (*at, name) in self.idle:
                says_when = f"{path}.{name}" in EFFECTS  # else its section says it for all
                here = _comment("No effect here.", indent) if says_when else ()
                yield from map(self.grey, [*here, *lines])
            else:
                yield from lines

    def setting(
        self, path: str, setting: Setting, value: Any, at: Place, indent: str
    ) -> Iterator[str]:
        name = setting.name
        yield from _comment(f"{setting.meaning} {setting.condition}", indent)
        yield from _comment(setting.summary.replace("`", ""), indent)
        if value and f"{path}.{name}.NAME" in self.known:
            yield f"{indent}{name}:"
            for key, entry in value.items():
                yield f"{indent}  {key}:"
                inner = (*at, name, key)
                yield from self.settings(f"{path}.{name}.NAME", entry, inner, indent + "    ")
        elif value and f"{path}.{name}[]" in self.known:
            yield f"{indent}{name}:"
            for entry in value:
                yield f"{indent}  -"
                yield from self.settings(f"{path}.{name}[]", entry, (*at, name), indent + "    ")
        else:
            yield f"{indent}{name}: {_yaml(value)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    start = f"{indent}# "
    wrap = textwrap.TextWrapper(
        _WIDTH, start, start, break_long_words=False, break_on_hyphens=False
    )
    for paragraph in text.split("\n\n"):
        yield from wrap.wrap(paragraph)


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize)
    return text.removesuffix("...\n").strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference_page())
