"""The accuracy that the warm start of the built-in model leaves: a minute on one quiet core.

    python -m benchmarks.warm_start [--seeds N] [--json FILE]

Trains the built-in model by its recipe, as the first `asyncrl run` does, and with other seeds.
Fails if the sampled accuracy at the recipe's own seed is outside the range that the recipe expects.
`tests/asyncrl/tasks/builtin/test_warm_start.py` checks in a second that the training is still the
one that was measured so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.tasks.builtin.warm_start import warm_start
from asyncrl.tasks.builtin.warm_start_recipe import RECIPE
from asyncrl.tasks.model import builtin_tokenizer
from benchmarks.report import add_smoke, write_json
from benchmarks.tiny_models import SMOKE_START


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_start", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many models")
    parser.add_argument("--quick", action="store_true", help="changes nothing")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    add_smoke(parser)
    options = parser.parse_args(arguments)
    recipe = SMOKE_START if options.smoke else RECIPE
    low, high = recipe.expected
    accuracies: dict[str, float] = {}
    for seed in range(recipe.seed, recipe.seed + options.seeds):
        made = warm_start(builtin_tokenizer(), replace(recipe, seed=seed))
        accuracies[f"accuracy_seed_{seed}"] = made.sampled_accuracy or 0.0
        print(
            f"seed {seed}: accuracy {made.sampled_accuracy:.3f} of {recipe.dev_problems} problems "
            f"after {made.steps} steps, {made.seconds:.0f} s (expected: {low} to {high})"
        )
    if options.json:
        write_json(options.json, "warm_start", {}, accuracies, smoke=options.smoke)
    return 0 if low <= accuracies[f"accuracy_seed_{recipe.seed}"] <= high else 1


if __name__ == "__main__":
    raise SystemExit(main())
