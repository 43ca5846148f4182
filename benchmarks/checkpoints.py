"""How long training stands still for a checkpoint, and how fast one is written, read and exported.

    python -m benchmarks.checkpoints [--quick] [--folder DIR] [--json FILE]

A random model is trained on groups of random tokens. A checkpoint is written while training waits
(`trainer.async_checkpoints: false`), and from a copy while the next steps are trained. Blocked is
the time until training may continue, and what the next optimizer step waits for the copy.
`--folder` is on the disk that is measured.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.checkpoint.checkpoint import Pending
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.learner import Learner
from benchmarks.harness import parser_of, write_json

VOCABULARY, GROUP_SIZE = 4096, 4


@dataclass(frozen=True)
class Effort:
    hidden: int
    layers: int
    repetitions: int
    response: int
    """Tokens of each sample."""


QUICK = Effort(512, 8, 3, 256)
FULL = Effort(1024, 12, 5, 256)
SMOKE = Effort(128, 1, 1, 16)


@dataclass(frozen=True)
class Found:
    state_bytes: int
    synchronous_seconds: float
    copy_seconds: float
    """From the beginning of a copy to its end, with nothing else running."""
    begin_seconds: float
    """Until training may continue."""
    settle_seconds: float
    """That the next optimizer step waits for the copy."""
    asynchronous_seconds: float
    """Until the checkpoint has its name, with training continuing."""
    step_seconds: float
    step_while_writing_seconds: float
    restore_seconds: float
    export_seconds: float


def measure(effort: Effort, folder: Path) -> Found:
    model = folder / "model"
    _random_model(effort).save_pretrained(model)
    config = TrainerConfig(device="cpu", keep_checkpoints=1, learning_rate=1e-5)
    learner = Learner(config, str(model), group_size=GROUP_SIZE, seed=1)
    _train(learner, effort)
    synchronous, copies, begin, settle, whole, alone, meanwhile = ([] for _ in range(7))
    for _ in range(effort.repetitions):
        at = path_of(folder / "synchronous", learner.policy_version)
        synchronous.append(_seconds(lambda at=at: learner.save(at)))
        alone.append(_train(learner, effort))
    for repetition in range(effort.repetitions + 1):
        began = time.monotonic()
        pending = learner.pending(copied=True)
        begin_seconds, settle_seconds = time.monotonic() - began, learner.settle()
        if repetition:  # the first one takes the memory
            copies.append(begin_seconds + settle_seconds)
    for _ in range(effort.repetitions):
        began = time.monotonic()
        pending = learner.pending(copied=True)
        begin.append(time.monotonic() - began)
        at = path_of(folder / "asynchronous", learner.policy_version)
        ended: list[float] = []

        def write(pending: Pending = pending, at: Path = at, ended: list[float] = ended) -> None:
            learner.write(pending, at)
            ended.append(time.monotonic())

        writing = threading.Thread(target=write)
        writing.start()
        waited: list[float] = []
        while writing.is_alive():
            meanwhile.append(_train(learner, effort, waited))
        settle.append(waited[0])
        writing.join()
        whole.append(ended[0] - began)
        del pending
    (saved,) = (folder / "asynchronous").iterdir()
    files = list(saved.rglob("*.safetensors"))
    median = statistics.median
    return Found(
        sum(path.stat().st_size for path in files),
        median(synchronous),
        median(copies),
        median(begin),
        median(settle),
        median(whole),
        median(alone),
        median(meanwhile),
        median(_seconds(lambda: learner.restore(saved)) for _ in range(effort.repetitions)),
        _seconds(lambda: export(saved, folder / "exported", torch.bfloat16)),
    )


def ratios_of(found: Found) -> dict[str, float]:
    """What the issue asks for, and what it costs."""
    blocked = found.begin_seconds + found.settle_seconds
    return {
        "blocked_share": blocked / found.synchronous_seconds,
        "copy_share": found.copy_seconds / found.synchronous_seconds,
        "synchronous_bytes_per_second": found.state_bytes / found.synchronous_seconds,
        "asynchronous_bytes_per_second": found.state_bytes / found.asynchronous_seconds,
        "restore_bytes_per_second": found.state_bytes / found.restore_seconds,
        "step_while_writing_vs_alone": found.step_while_writing_seconds / found.step_seconds,
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _train(learner: Learner, effort: Effort, settled: list[float] | None = None) -> float:
    """One step of one group; its seconds. Notes what it waited for a copy."""
    began = time.monotonic()
    version = learner.policy_version
    rng = np.random.default_rng(version)
    group = [_sample(rng, version, sample, effort.response) for sample in range(GROUP_SIZE)]
    learner.add_group(group, rng.normal(size=GROUP_SIZE).astype(np.float32))
    waited = learner.settle()
    if settled is not None:
        settled.append(waited)
    learner.step()
    return time.monotonic() - began


def _sample(rng: np.random.Generator, version: int, sample: int, length: int) -> Trajectory:
    prompt, tokens = (rng.integers(3, VOCABULARY, n).astype(np.int32) for n in (16, length))
    logprobs = np.full(length, -8.3, np.float32)
    builder = TrajectoryBuilder(SampleId(version, sample), f"prompt {version}", prompt)
    builder.append(
        tokens=tokens,
        logprobs=logprobs,
        topk_ids=tokens[:, None],
        topk_logprobs=logprobs[:, None],
        noise_seeds=np.zeros(length, np.uint64),
        provenance=np.full(length, Provenance.SAMPLED, np.uint8),
        policy_version=version,
    )
    return builder.finish("stop")


def _random_model(effort: Effort) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=effort.hidden,
            intermediate_size=3 * effort.hidden,
            num_hidden_layers=effort.layers,
            num_attention_heads=effort.hidden // 64,
            num_key_value_heads=effort.hidden // 128,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "a model of 30M parameters")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: /tmp")
    args = parser.parse_args(arguments)
    effort = SMOKE if args.smoke else QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory(prefix="asyncrl-checkpoints-", dir=args.folder) as folder:
        found = measure(effort, Path(folder))
    ratios = ratios_of(found)
    table = Table(title="checkpoints")
    for column in ("", "value"):
        table.add_column(column, justify="right")
    for name, value in (asdict(found) | ratios).items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}")
    Console(width=100).print(table)
    if args.json:
        write_json(args.json, "checkpoints", asdict(found), ratios, smoke=args.smoke)


if __name__ == "__main__":
    main()
