"""Print the rules: `python -m asyncrl.monitoring.rules [--faster NUMBER]`.

`--faster` divides all their times by a number, to see alerts within minutes: `for`, ranges,
offsets, and numbers of seconds and of tokens in comparisons. Numbers of events and ratios stay.
"""

import argparse
import re
import sys
from pathlib import Path

RULES = Path(__file__).parent / "asyncrl.yaml"

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATIONS = re.compile(r"(?P<before>for: |offset |\[|:)(?P<number>\d+)(?P<unit>[smhd])\b")
_SECONDS = re.compile(r"(?<=_seconds > )\d+\b(?! \*)|(?<=4 \* )3600")
_TOKENS = re.compile(r"(?<=\[1h\]\)\) > )\d+")


def faster(text: str, factor: float) -> str:
    """Divide the times of the rules in `text` by `factor`; ValueError unless it is above 0."""
    if not factor > 0:
        raise ValueError(f"rules cannot be made {factor} times faster; give a number above 0")

    def divided(found: re.Match[str]) -> str:
        seconds = int(found["number"]) * _UNITS[found["unit"]] / factor
        return f"{found['before']}{max(1, round(1000 * seconds))}ms"

    def number(found: re.Match[str]) -> str:
        return f"{int(found[0]) / factor:g}"

    return _DURATIONS.sub(divided, _SECONDS.sub(number, _TOKENS.sub(number, text)))


def main() -> None:
    """Print the rules."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.monitoring.rules", description=__doc__)
    parser.add_argument("--faster", type=float, default=1.0, help="divide all times by this number")
    options = parser.parse_args()
    text = RULES.read_text(encoding="utf-8")
    try:
        sys.stdout.write(text if options.faster == 1 else faster(text, options.faster))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
