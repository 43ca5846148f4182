"""Decides which settings `asyncrl set` may change during a run, and when they take effect."""

from typing import Any

from pydantic import BaseModel

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ConfigError, UserError
from asyncrl.mutability import LIVE, RULES, When, rule_of
from asyncrl.suggestions import command_for, nearest, shortened


def check_is_safe(key: str, config: RunConfig) -> When:
    """Return when a change of this setting takes effect in a live run.

    Raises ConfigError for an unknown setting, UserError with an alternative for a fixed one.
    """
    if key in LIVE:
        return RULES[key].when
    known = dict(_keys(RunConfig))
    if key not in known:
        last = key.rpartition(".")[2]
        same = [one for one in known if one.rpartition(".")[2] == last]  # in another section
        hint = f" Did you mean {same[0]!r}?" if same else nearest(key, known)
        raise ConfigError(f"there is no setting {shortened(key)!r}.{hint}")
    if known[key]:
        raise ConfigError(f"{key} is a section; name one of its settings, such as {key}.KEY")
    rule = rule_of(key)
    stop = command_for("stop", config.directory)
    usual = f"Stop the run and continue it with `--resume --set {key}=VALUE`"
    if rule.when == "never":
        usual = "Start a new run under another name"
    instead = (rule.instead or usual).replace("Stop the run", f"Stop the run (`{stop}`)")
    instead = instead.replace("RUN/", f"{config.directory}/")
    raise UserError(
        f"{key} cannot be changed while the run is active: {rule.reason}. {instead}. "
        f"Settings that can be changed: {', '.join(LIVE)}"
    )


def _keys(model: type[BaseModel], outer: str = "") -> list[tuple[str, bool]]:
    found = []
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
        found.append((f"{outer}{name}", is_section))
        if is_section:
            found += _keys(inner, f"{outer}{name}.")
    return found
