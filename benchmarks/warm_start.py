"""Does the warm start of the built-in model still leave the accuracy that its recipe expects?

    python -m benchmarks.warm_start [--seeds N] [--json FILE]

Trains the built-in model as the first `asyncrl run` does, a minute on one quiet core, and with
other seeds. Exit code 1 if the sampled accuracy at the recipe's own seed is out of its range.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.tasks.builtin.warm_start import warm_start
from asyncrl.tasks.builtin.warm_start_recipe import RECIPE
from asyncrl.tasks.model import builtin_tokenizer
from benchmarks.harness import parser_of, report
from benchmarks.tiny_models import SMOKE_START


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "changes nothing")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many models")
    options = parser.parse_args(arguments)
    recipe = SMOKE_START if options.smoke else RECIPE
    low, high = recipe.expected
    found: dict[str, float] = {}
    for seed in range(recipe.seed, recipe.seed + options.seeds):
        made = warm_start(builtin_tokenizer(), replace(recipe, seed=seed))
        found[f"accuracy_seed_{seed}"] = made.sampled_accuracy or 0.0
        print(f"seed {seed}: {made.steps} steps, {made.seconds:.0f} s; expected: {low} to {high}")
    report(options, "warm_start", {}, found)
    return int(not low <= found[f"accuracy_seed_{recipe.seed}"] <= high)


if __name__ == "__main__":
    sys.exit(main())
