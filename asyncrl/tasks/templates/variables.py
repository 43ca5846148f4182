"""The variables of a model's chat template: those of `task.chat_template_kwargs`, and the date.

Templates that show today's date (Llama 3.2, Granite) call `strftime_now`. They get the same day
throughout a run, even after a resume: prompts do not change at midnight, and text that is rendered
again gives the same tokens.
"""

import re
from datetime import UTC, date, datetime, time
from typing import Any

from asyncrl.errors import DataError
from asyncrl.tasks.config import TaskConfig

NOW = "strftime_now"
"""The function that templates call for the date, with a format such as `%d %b %Y`."""


def today() -> date:
    """Return the local date."""
    return datetime.now(UTC).astimezone().date()  # noqa: TID251 - chat templates get the day


def template_text(tokenizer: Any) -> str:
    """Return a tokenizer's chat templates, concatenated; empty without one."""
    given = getattr(tokenizer, "chat_template", None) or ""
    return given if isinstance(given, str) else "\n".join(given.values())


def names_the_date(tokenizer: Any) -> bool:
    """Return True if prompts depend on `task.chat_template_date`."""
    return NOW in template_text(tokenizer)


def template_variables(tokenizer: Any, config: TaskConfig) -> dict[str, Any]:
    """Return the template's variables besides messages and tools. Raises DataError."""
    text, variables = template_text(tokenizer), dict(config.chat_template_kwargs)
    for name in variables:
        if re.search(rf"\b{re.escape(name)}\b", text) is None:
            has = "does not use it" if text else "does not exist"
            raise DataError(f"task.chat_template_kwargs: {name} has no effect: the template {has}")
    if NOW in text:
        day = config.chat_template_date or today()
        variables[NOW] = datetime.combine(day, time()).strftime
    return variables
