"""Print the rules: `python -m asyncrl.monitoring.rules [--faster NUMBER]`."""

from __future__ import annotations

import argparse
import sys

from asyncrl.monitoring.rules.faster import RULES, faster


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
