"""A table of a step's samples on the terminal (`run.print_samples`)."""

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.monitoring.terminal.formatting import number, without_controls
from asyncrl.wire.messages.from_trainer import ShownSample

_MIN_WIDTH = 60


def completions(
    samples: Sequence[ShownSample], labels: Sequence[str], *, step: int, width: int
) -> str:
    """Draw samples of a step, with the result of each reward function by its label."""
    table = Table(title=f"samples of step {step}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("prompt", ratio=1, overflow="fold")
    table.add_column("response", ratio=2, overflow="fold")
    several = labels if len(labels) > 1 else ()
    for name in (*several, "reward", "tokens"):
        table.add_column(name, justify="right")
    for one in samples:
        terms = one.terms or (None,) * len(several)
        cut = "" if one.finish_reason == "stop" else f" ({one.finish_reason})"
        texts = [_clean(one.prompt), _clean(one.response)]
        numbers = [number(value, 3) for value in (*terms[: len(several)], one.reward)]
        table.add_row(*map(Text, [*texts, *numbers, f"{one.tokens:,}{cut}"]))
    drawn = io.StringIO()
    Console(file=drawn, width=max(width, _MIN_WIDTH), color_system=None).print(table)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines() if line.strip())


def _clean(text: str) -> str:
    return without_controls(text).strip().replace("\n", " ↵ ")
