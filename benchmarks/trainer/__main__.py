"""Tokens a second, arithmetic against the machine's peak, and memory of a training step.

    python -m benchmarks.trainer --quick --json FILE

Contenders, each in a process of its own, on the same model, samples, loss and threads, in turns:

    asyncrl   `trainer.learner`: packed, shared prompts once, log-probabilities a block at a time
    plain     transformers as one writes it first: groups padded to their longest, all logits
    trl       the loss of TRL's GRPOTrainer on the given samples (its environment is made if it is
              missing; `--contenders asyncrl plain` leaves it out)

Ratios, from medians of the steps after the first:

    vs_transformers_NAME        seconds of plain over those of asyncrl
    vs_trl_NAME                 the same of TRL
    mfu_vs_peak                 arithmetic of real tokens a second over the best float32 matrix
                                product that this machine did, with as many threads, before, between
                                and after the contenders: the speed of the machine changes
    peak_memory_vs_plain_NAME   peak memory of the processes, all included

`vs_transformers`, `peak_memory_vs_plain` and `mfu_vs_peak` are those of the targets in TARGETS. Run
it on a quiet machine: with other work next to it, everything but memory means little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table

from asyncrl.trainer.cpu.layers import onednn_is_faster, product
from benchmarks.harness import parser_of, pick, report, table, targets_table
from benchmarks.peers.contestants import TrlMissingError, ensure_trl
from benchmarks.tiny_models import qwen3

GROUP_SIZE = 8


@dataclass(frozen=True)
class Workload:
    """A model and the samples of one step."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    prompt: int
    """Tokens of each prompt."""
    longest: int
    """Tokens of the longest response."""
    tokens: int
    """Of all samples, prompts included, about."""

    @property
    def intermediate(self) -> int:
        """Width of the MLP, 8/3 of the hidden size."""
        return self.hidden * 8 // 3

    @property
    def heads(self) -> int:
        """Of 64 numbers each; a third of them for keys and values."""
        return self.hidden // 64

    def write(self, folder: Path, seed: int) -> None:
        """Save the model, random, and the samples: prompts, responses, log-probabilities, rewards.

        Lengths of responses are lognormal, as they are in training: most are a fraction of the
        longest, and one is cut off there.
        """
        qwen3(
            self.vocabulary, self.hidden, self.layers, seed=seed,
            intermediate_size=self.intermediate, num_key_value_heads=max(1, self.heads // 3),
            max_position_embeddings=self.prompt + self.longest,
        ).save_pretrained(folder)  # fmt: skip
        rng = np.random.default_rng(seed)
        groups: list[dict[str, Any]] = []
        while sum(map(_tokens, groups)) < self.tokens:
            lengths = rng.lognormal(np.log(0.3 * self.longest), 0.8, GROUP_SIZE)
            if not groups:
                lengths[0] = self.longest
            groups.append(
                {
                    "prompt": rng.integers(0, self.vocabulary, self.prompt).tolist(),
                    "responses": [
                        rng.integers(0, self.vocabulary, count).tolist()
                        for count in np.clip(lengths, 8, self.longest).astype(int)
                    ],
                    "rewards": rng.integers(0, 2, GROUP_SIZE).tolist(),
                }
            )
            groups[-1]["rewards"][0], groups[-1]["rewards"][1] = 0, 1  # every group has a signal
        (folder / "samples.json").write_text(json.dumps({**asdict(self), "groups": groups}))


def _tokens(group: dict[str, Any]) -> int:
    return sum(len(one) + len(group["prompt"]) for one in group["responses"])


@dataclass(frozen=True)
class Costs:
    """What the samples of a step cost, by arithmetic."""

    tokens: int
    """Prompts and responses, as users count them: each sample with its prompt."""
    flops: float
    """Forward and backward pass of real tokens, those that a group shares once. 6 a parameter and
    token, 6 a number of the head and response token, causal attention. Nothing for padding or
    for what is computed again."""
    padded: int
    """Tokens of groups that are padded to their longest sample."""


def costs_of(workload: Workload, groups: Sequence[dict[str, Any]]) -> Costs:
    hidden, size = workload.hidden, 64
    kv = max(1, workload.heads // 3)
    layer = hidden * size * (2 * workload.heads + 2 * kv) + 3 * hidden * workload.intermediate
    flops, tokens, padded = 0.0, 0, 0
    for group in groups:
        prompt = len(group["prompt"])
        lengths = [len(one) for one in group["responses"]]
        row = prompt + sum(lengths)
        tokens += prompt * len(lengths) + sum(lengths)
        padded += (prompt + max(lengths)) * len(lengths)
        pairs = prompt**2 / 2 + sum(one * prompt + one**2 / 2 for one in lengths)
        attention = 12 * workload.heads * size * pairs
        flops += workload.layers * (6 * layer * row + attention)
        flops += 6 * hidden * workload.vocabulary * sum(lengths)
    return Costs(tokens, flops, padded)


WORKLOADS = (
    Workload("100m", 64, hidden=768, layers=16, prompt=64, longest=512, tokens=3_000),
    Workload("small", 64, hidden=256, layers=4, prompt=16, longest=192, tokens=8_000),
    Workload("vocabulary", 151_936, hidden=256, layers=4, prompt=64, longest=960, tokens=100),
)
SMOKE = Workload("small", 64, hidden=64, layers=1, prompt=8, longest=24, tokens=200)
TARGETS = {"vs_transformers": 2.0, "mfu_vs_peak": 0.6, "peak_memory_vs_plain": 0.35}
FLOORS = ("vs_transformers", "mfu_vs_peak")
CONTENDERS = ("asyncrl", "plain", "trl")
PRODUCT, SMALL_PRODUCT = 2048, 64
"""Rows and columns of the matrices whose product is the peak."""
_COPIES = 3.3
"""Of all logits of a padded group that plain transformers holds at a time (measured: 3.1)."""
_SECONDS = 900.0
"""Longest time of one process."""
_ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "2 steps after the first, not 5")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    names = [one.name for one in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
        help="a setting of asyncrl's trainer, as compile=true",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    steps = pick(options, 6, 3, 2)
    size = SMALL_PRODUCT if options.smoke else PRODUCT
    raw: dict[str, Any] = {"threads": options.threads, "settings": options.settings}
    peaks = [peak_flops(options.threads, size)]
    chosen = [one for one in WORKLOADS if one.name in options.workloads]
    if options.smoke:
        chosen, options.contenders = [SMOKE], list(CONTENDERS[:2])
        print("TRL is left out of a smoke")
    for workload in chosen:
        raw[workload.name] = measure(workload, steps, options, peaks, size)
    raw["peak_flops"], peak = peaks, max(peaks)
    ratios: dict[str, float] = {}
    for workload in chosen:
        ratios |= ratios_of(workload.name, raw[workload.name], peak)
    ratios |= of_targets(ratios)
    shown = [table_of(workload.name, raw[workload.name], peak) for workload in chosen]
    shown.append(targets_table(ratios, TARGETS, FLOORS))
    report(options, "trainer", raw, ratios, *shown)
    return 0


def measure(
    workload: Workload, steps: int, options: argparse.Namespace, peaks: list[float], size: int
) -> dict[str, Any]:
    """Seconds of each step and bytes, by contender; what the step costs by arithmetic.

    Adds the best matrix product after each contender to `peaks`.
    """
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        workload.write(Path(folder), seed=0)
        groups = json.loads((Path(folder) / "samples.json").read_text())["groups"]
        costs: Costs = costs_of(workload, groups)
        found["costs"] = {"tokens": costs.tokens, "flops": costs.flops, "padded": costs.padded}
        padded = (workload.prompt + workload.longest) * GROUP_SIZE
        needed = _COPIES * 4 * workload.vocabulary * padded
        for contender in options.contenders:
            if contender != "asyncrl" and needed > available_bytes():
                print(f"{contender} is left out: it may need {needed / 2**30:.0f} GiB")
                continue
            settings = options.settings if contender == "asyncrl" else ()
            result = run_child(contender, Path(folder), steps, options.threads, settings)
            if result is not None:
                found[contender] = result
            peaks.append(peak_flops(options.threads, size))
    return found


def available_bytes() -> int:
    """Memory that is free now, as Linux counts it."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(one.split()[1]) * 1024 for one in lines if one.startswith("MemAvailable:"))


def run_child(
    contender: str, folder: Path, steps: int, threads: int, settings: Any
) -> dict[str, Any] | None:
    """What `benchmarks.trainer.child` prints; None if it cannot run here, which is said."""
    python = sys.executable
    if contender == "trl":
        try:
            python = str(ensure_trl())
        except TrlMissingError as error:
            print(f"TRL is left out: {error}")
            return None
    command = [python, "-m", "benchmarks.trainer.child", contender, str(folder), str(steps)]
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [*command, *settings], env=environment, capture_output=True, text=True, timeout=_SECONDS
    )
    if done.returncode:
        print(f"{contender} failed ({done.returncode}):\n{done.stderr[-2000:]}")
        return None
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def peak_flops(threads: int, size: int, repeats: int = 5) -> float:
    """The most float32 operations a second of a square matrix product, by MKL or oneDNN."""
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    ways = [lambda: a @ b]
    if onednn_is_faster():
        ways.append(lambda: product(a, b))
    best = 0.0
    for way in ways:
        way()
        for _ in range(repeats):
            began = time.perf_counter()
            way()
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def seconds_of(result: dict[str, Any]) -> float:
    """Median of the steps after the first."""
    return statistics.median(result["seconds"][1:])


def ratios_of(name: str, found: dict[str, Any], peak: float) -> dict[str, float]:
    """Of one workload; those whose contender did not run are missing."""
    ratios: dict[str, float] = {}
    ours = found.get("asyncrl")
    if ours is None:
        return ratios
    ratios[f"mfu_vs_peak_{name}"] = found["costs"]["flops"] / seconds_of(ours) / peak
    for other, label in (("plain", "transformers"), ("trl", "trl")):
        if other in found:
            ratios[f"vs_{label}_{name}"] = seconds_of(found[other]) / seconds_of(ours)
            memory = ours["peak_bytes"] / found[other]["peak_bytes"]
            ratios[f"peak_memory_vs_{other}_{name}"] = memory
    return ratios


def of_targets(ratios: dict[str, float]) -> dict[str, float]:
    """The ratios that have a target: speed is the worst of all models, the rest of one."""
    found: dict[str, float] = {}
    speeds = [value for key, value in ratios.items() if key.startswith("vs_transformers_")]
    if speeds:
        found["vs_transformers"] = min(speeds)
    for target, source in (
        ("mfu_vs_peak", "mfu_vs_peak_100m"),
        ("peak_memory_vs_plain", "peak_memory_vs_plain_vocabulary"),
    ):
        if source in ratios:
            found[target] = ratios[source]
    return found


def table_of(name: str, found: dict[str, Any], peak: float) -> Table:
    costs = found["costs"]
    seconds = {one: seconds_of(found[one]) for one in CONTENDERS if one in found}
    return table(
        f"{name}: {costs['tokens']:,} tokens a step, {costs['padded']:,} with padding, "
        f"{costs['flops'] / 1e12:.2f} TFLOP; peak {peak / 1e9:.0f} GFLOP/s",
        "contender,s,tokens/s,of the peak,GiB,gradient norm",
        (
            (
                one, taken, costs["tokens"] / taken, f"{costs['flops'] / taken / peak:.1%}",
                found[one]["peak_bytes"] / 2**30, found[one]["norms"][0],
            )
            for one, taken in seconds.items()
        ),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
