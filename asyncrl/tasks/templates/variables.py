"""The variables of a model's chat template: those of `task.chat_template_kwargs`, and the date.

Templates that name today's date (Llama 3.2, Granite) ask `strftime_now` for it. A run gives them
one day from its start to its end, also when it is resumed: the prompts of a run do not change at
midnight, and tokens that are rendered again are the same.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time
from typing import Any

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig

NOW = "strftime_now"
"""What templates call for the date, with a format such as `%d %b %Y`."""


def today() -> date:
    """The day here."""
    return datetime.now(UTC).astimezone().date()  # noqa: TID251 - chat templates get the day


def template_text(tokenizer: Any) -> str:
    """A tokenizer's chat template, or all that it has, one after the other; empty without one."""
    given = getattr(tokenizer, "chat_template", None) or ""
    return given if isinstance(given, str) else "\n".join(given.values())


def names_the_date(tokenizer: Any) -> bool:
    """Whether prompts depend on `task.chat_template_date`."""
    return NOW in template_text(tokenizer)


def template_variables(tokenizer: Any, config: TaskConfig) -> dict[str, Any]:
    """What the chat template is rendered with besides messages and tools.

    Raises:
        DataError: the template has no variable of such a name.
    """
    text, variables = template_text(tokenizer), dict(config.chat_template_kwargs)
    for name in variables:
        if re.search(rf"\b{re.escape(name)}\b", text) is None:
            has = "does not use it" if text else "does not exist"
            raise DataError(
                f"task.chat_template_kwargs: {name} has no effect: the model's chat template {has}"
            )
    if NOW in text:
        day = config.chat_template_date or today()
        variables[NOW] = datetime.combine(day, time()).strftime
    return variables
