"""Numbers and text formatted for people."""

from collections.abc import Sequence

UNKNOWN = "–"
"""Shown for a number that is not known (yet)."""
ON_POLICY = {True: "exactly on-policy", False: "not exactly on-policy"}
"""Keyed by whether all steps of a run were on-policy."""

_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = 2) -> str:
    """`0.71`; a dash for None and nan, as in all functions here."""
    if value is None or value != value:
        return UNKNOWN
    return f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """`42%` for 0.42."""
    if value is None or value != value:
        return UNKNOWN
    return f"{100 * value:.{digits}f}%"


def count(value: float | None) -> str:
    """`950`, `7,512`, `1.25M`, `3.1G`: in full below a million, shortened above."""
    if value is None or value != value:
        return UNKNOWN
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.0f}"


def size(number_of: float) -> str:
    """Bytes.

    >>> size(70 * 2**30), size(3 * 2**30), size(5 * 2**20), size(40_000)
    ('70 GiB', '3.0 GiB', '5 MiB', '39 KiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if (value := number_of / 2**power) >= 1:
            return f"{value:.1f} {unit}" if power == 30 and value < 10 else f"{value:,.0f} {unit}"
    return f"{number_of / 1024:.0f} KiB"


def counted(number_of: int, what: str) -> str:
    """`1 turn`, `3 turns`."""
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"


def ended(finish_reason: str, *, several_turns: bool) -> str:
    """Describe how a sample was cut off (with `several_turns` by tokens or turns); empty if not."""
    limit = "limit of tokens or turns" if several_turns else "token limit"
    cuts = {"length": f"cut at the {limit}", "deadline": "cut at its deadline"}
    return cuts.get(finish_reason, "")


def duration(seconds: float | None) -> str:
    """`0.4 s`, `42 s`, `3 min 20 s`, `5 h 07 min`, `2 d 3 h`."""
    if seconds is None or seconds != seconds:
        return UNKNOWN
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def brief(seconds: float) -> str:
    """`3.2 ms`; from a second on like `duration`."""
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else duration(seconds)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last `width` values as bars of eight heights, scaled to the values shown: `▁▅█`."""
    shown = [value for value in values if value == value][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high - low < 1e-12:
        return _BARS[3] * len(shown)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / (high - low) * top)] for value in shown)


def without_controls(text: str) -> str:
    """The text without control characters (terminal escapes included) and with tabs expanded."""
    return "".join(
        char for char in text.expandtabs(4) if char == "\n" or (char.isprintable() or char == " ")
    )
