"""Weights between nodes: how fast are they passed on, and what do deltas save?

A part of `python -m benchmarks.weights`: processes on loopback TCP. `tcp_vs_memcpy`: seconds until
one receiver has 400 MB (encrypted; `tcp_plain_vs_memcpy` without), over one copy in memory.
`tree4_vs_one`: until four receivers have it, over one, with links paced to a stated bandwidth,
since all share this machine's cores (`tree4_vs_one_unpaced`). `delta_bytes_share`: what a node is
sent of a step over all bytes, for real steps of a trained and a random model, the worst step. The
table of 7B and 32B is arithmetic: bytes over bandwidth, and a chunk for each node in between.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import CoreSettings, DecodeCore
from asyncrl.engine.torch.model import load_model
from asyncrl.rewards.functions import arithmetic
from asyncrl.rollout.trajectory import SampleId, Trajectory, TrajectoryBuilder
from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from asyncrl.tasks.prompts import Prompt
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner
from asyncrl.wire.messages.chain import Ask
from asyncrl.wire.weights.chain.source import PublishedVersions
from asyncrl.wire.weights.chunks import CHUNK_BYTES, Grid, name_of
from asyncrl.wire.weights.layout import SHARED_MEMORY, WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks.harness import table
from benchmarks.tiny_models import SMOKE_START
from benchmarks.weights_nodes import Answer, Link, Nodes, nodes

LEARNING_RATE = 1e-6
_GROUPS, _GROUP_SIZE, _TOKENS = 4, 4, 48
_MAX_LEN = 160

Reward = Callable[[Prompt, Trajectory], float]


def share_of(versions: PublishedVersions, before: WeightManifest, after: WeightManifest) -> float:
    """Bytes that a node which holds one version is sent of the next, over all bytes."""
    sent = 0
    for index in range(Grid(after.nbytes).count):
        held, base = versions.to_send(Ask(name_of(after), index, name_of(before)))
        sent += sum(map(len, held.encoded(index, base)[1]))
    return sent / after.nbytes


class _Run:
    """Samples, steps and publishes in one process."""

    def __init__(
        self, model: str, directory: Path, prompts: Sequence[Prompt], stop: tuple[int, ...]
    ) -> None:
        cpu = torch.device("cpu")
        config = TrainerConfig(learning_rate=LEARNING_RATE, device="cpu", warmup_steps=0)
        self.learner = Learner(config, model, group_size=_GROUP_SIZE, seed=0)
        slots = _GROUPS * _GROUP_SIZE
        loaded = load_model(
            model, slots=slots + 2, max_len=_MAX_LEN, device=cpu, dtype=torch.bfloat16
        )
        self.core = DecodeCore(loaded, CoreSettings(None, 0, 4096, 16, 8), None, seed=0)
        self.publisher = WeightPublisher(directory, "deltas", dtype=torch.bfloat16)
        self._prompts, self._stop = prompts, stop

    def publish(self) -> WeightManifest:
        version = self.learner.policy_version
        manifest = self.publisher.publish(self.learner.tensors(), version)
        self.core.stage_weights(manifest)
        self.core.install_weights(version)
        return manifest

    def step(self, reward: Reward) -> float:
        version = self.learner.policy_version
        builders: dict[str, TrajectoryBuilder] = {}
        for group in range(_GROUPS):
            prompt = self._prompts[(version * _GROUPS + group) % len(self._prompts)]
            for index in range(_GROUP_SIZE):
                name = f"{group}.{index}"
                sample = SampleId(version * _GROUPS + group, index)
                builders[name] = TrajectoryBuilder(sample, prompt.prompt_id, prompt.tokens)
                sampling = SamplingParams(
                    max_tokens=_TOKENS,
                    stop_tokens=self._stop,
                    top_k_logprobs=8,
                    seed=1000 * version + 10 * group + index,
                )
                self.core.add(GenerateRequest(name, "", prompt.tokens, sampling))
        ended: dict[str, Trajectory] = {}
        while len(ended) < len(builders):
            for chunk in self.core.step():
                chunk.append_to(builders[chunk.request_id])
                if chunk.finish_reason is not None:
                    ended[chunk.request_id] = builders[chunk.request_id].finish(chunk.finish_reason)
        for group in range(_GROUPS):
            prompt = self._prompts[(version * _GROUPS + group) % len(self._prompts)]
            drawn = [ended[f"{group}.{index}"] for index in range(_GROUP_SIZE)]
            rewards = np.array([reward(prompt, one) for one in drawn], np.float32)
            self.learner.add_group(drawn, rewards)
        return float(self.learner.step().learning.grad_norm)


def steps(
    model: str, prompts: Sequence[Prompt], reward: Reward, count: int, stop: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The shares of `count` consecutive steps, and the scale of the weights."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        run, versions = _Run(model, Path(folder), prompts, stop), PublishedVersions()
        try:
            before = run.publish()
            versions.add(before)
            shares, norms = [], []
            for _ in range(count):
                norms.append(run.step(reward))
                after = run.publish()
                versions.add(after)
                shares.append(share_of(versions, before, after))
                before = after
        finally:
            run.publisher.close()
        matrices = [t for _, t in run.learner.tensors() if t.ndim > 1]
        scale = float(torch.cat([t.flatten() for t in matrices]).std())
    return {
        "parameters": sum(t.numel() for _, t in run.learner.tensors()),
        "standard_deviation": scale,
        "shares": shares,
        "gradient_norms": norms,
    }


def measure_deltas(
    make_random: Callable[[Path], str], count: int, *, smoke: bool
) -> dict[str, Any]:
    """Shares of the steps of two models, which the project's trainer takes at a 7B's learning rate.

    The built-in one (in a smoke: in miniature) gets the rewards of its task. The random one, which
    `make_random` saves and whose weights have the scale of 7B models, gets random rewards. AdamW's
    first steps are longest.
    """

    def right(prompt: Prompt, drawn: Trajectory) -> float:
        return arithmetic("", task.tokenizer.decode(drawn.tokens[:-1]), prompt.example)

    with tempfile.TemporaryDirectory() as folder:
        small = (Path(folder) / "small", None, SMOKE_START)
        trained = str(ensure_builtin_model(*(small if smoke else (default_cache_dir(),))))
        task = load_task(TaskConfig(), trained, seed=0)
        found = {"trained": steps(trained, task.train, right, count, task.stop_tokens)}
        rng = np.random.default_rng(0)
        prompts = [
            Prompt(f"p{i}", rng.integers(0, 4000, 24).astype(np.int32), "", {}) for i in range(8)
        ]
        model = make_random(Path(folder) / "random")
        found["random"] = steps(model, prompts, lambda *_: float(rng.normal()), count)
    return found


NBYTES = 400_000_000
PACE = 50_000_000.0
"""Bytes per second of a paced link: 0.4 Gbit/s."""
_CHANGED = 0.03
"""Share of the elements that differ between the versions of the measured delta."""
_SIZES = {"7B": 14e9, "32B": 64e9}
"""Bytes in bfloat16."""
_GIGABITS = (10, 25, 100)
_NODES = 16


def versions(nbytes: int) -> list[tuple[str, torch.Tensor]]:
    """A tensor of noise, and what makes a next version of it."""
    noise = np.random.default_rng(0).integers(0, 1 << 15, nbytes // 2, dtype=np.int16)
    return [("weights", torch.from_numpy(noise).view(torch.bfloat16))]


def memcpy_seconds(nbytes: int, repeats: int) -> float:
    source, target = (np.ones(nbytes, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class _Measurement:
    def __init__(self, nbytes: int, repeats: int) -> None:
        self._tensors = versions(nbytes)
        self._repeats = repeats
        self._publisher = WeightPublisher(SHARED_MEMORY, f"bench-chain-{id(self)}")
        self._version = 0

    def close(self) -> None:
        self._publisher.close()

    def seconds(
        self, chain: Nodes, count: int, *, deltas: bool = False, repeats: int | None = None
    ) -> dict[str, Any]:
        """Until `count` receivers have a version, median; the first two touch the memory."""
        found: list[float] = []
        answers: list[Answer] = []
        unmeasured = 0 if repeats else 2
        for _ in range((repeats or self._repeats) + unmeasured):
            taken, answers = chain.distribute(self._next(), count, deltas=deltas)
            found.append(taken)
        return {
            "seconds": statistics.median(found[unmeasured:]),
            "each": found,
            "bytes": [one.nbytes for one in answers],
            "parents_left": [one.left for one in answers],
        }

    def _next(self) -> Any:
        """Change every 33rd element, another one each time, and publish."""
        self._version += 1
        words = self._tensors[0][1].view(torch.int16)
        words[self._version :: round(1 / _CHANGED)] ^= 1
        return self._publisher.publish(self._tensors, self._version)


def seconds_by_arithmetic(share: float) -> list[dict[str, float | str]]:
    """Seconds by model and bandwidth until 1 and 16 nodes have a version."""
    rows: list[dict[str, float | str]] = []
    for model, nbytes in _SIZES.items():
        for gigabits in _GIGABITS:
            bandwidth = gigabits * 1e9 / 8
            behind = (_NODES - 1) * CHUNK_BYTES / bandwidth
            rows.append(
                {
                    "model": model,
                    "gigabits": gigabits,
                    "one_node_seconds": nbytes / bandwidth,
                    "sixteen_nodes_seconds": nbytes / bandwidth + behind,
                    "sixteen_nodes_delta_seconds": share * (nbytes / bandwidth + behind),
                    "sixteen_nodes_star_seconds": _NODES * nbytes / bandwidth,
                }
            )
    return rows


def measure(
    nbytes: int,
    repeats: int,
    steps: int,
    several: int,
    make_random: Callable[[Path], str],
    *,
    smoke: bool,
) -> dict[str, Any]:
    """All numbers; seconds and bytes. `several` receivers are four, or fewer in a smoke."""
    run = _Measurement(nbytes, repeats)
    raw: dict[str, Any] = {
        "nbytes": nbytes,
        "memcpy_seconds": memcpy_seconds(nbytes, 5),
        "paced_bytes_per_second": PACE,
    }
    try:
        with nodes(several, Link()) as chain:
            raw["four"] = run.seconds(chain, several)
            raw["one"] = run.seconds(chain, 1)
            raw["one_delta"] = run.seconds(chain, 1, deltas=True)
        with nodes(1, Link(encrypted=False)) as chain:
            raw["one_plain"] = run.seconds(chain, 1)
        with nodes(several, Link(bytes_per_second=PACE)) as chain:
            raw["four_paced"] = run.seconds(chain, several, repeats=1)
            raw["one_paced"] = run.seconds(chain, 1, repeats=1)
    finally:
        run.close()
    raw["deltas"] = measure_deltas(make_random, steps, smoke=smoke)
    raw["arithmetic"] = seconds_by_arithmetic(ratios_of(raw)["delta_bytes_share"])
    return raw


def ratios_of(raw: dict[str, Any]) -> dict[str, float]:
    """Of what `measure` gives. The share is that of the worst step of the worse model."""

    def seconds(name: str) -> float:
        return float(raw[name]["seconds"])

    return {
        "tcp_vs_memcpy": seconds("one") / raw["memcpy_seconds"],
        "tcp_plain_vs_memcpy": seconds("one_plain") / raw["memcpy_seconds"],
        "tree4_vs_one": seconds("four_paced") / seconds("one_paced"),
        "tree4_vs_one_unpaced": seconds("four") / seconds("one"),
        "delta_vs_whole_seconds": seconds("one_delta") / seconds("one"),
        "delta_bytes_share": max(max(one["shares"]) for one in raw["deltas"].values()),
    }


def tables(raw: dict[str, Any]) -> list[Table]:
    """Seconds over loopback TCP, the shares of deltas step by step, and the arithmetic."""
    pace = f"{raw['paced_bytes_per_second'] / 1e6:.0f} MB/s links"
    names = {
        "one": "1 receiver, encrypted",
        "one_plain": "1 receiver, not encrypted",
        "one_delta": f"1 receiver, delta ({_CHANGED:.0%} changed)",
        "four": "4 receivers in a chain",
        "one_paced": f"1 receiver, {pace}",
        "four_paced": f"4 receivers, {pace}",
    }
    rows = [["a copy in memory", raw["memcpy_seconds"], raw["nbytes"] / 1e6]]
    for name, what in names.items():
        rows.append([what, raw[name]["seconds"], max(raw[name]["bytes"]) / 1e6])
    arithmetic = raw["arithmetic"]
    return [
        table("over loopback TCP, until all receivers have it", "what,seconds,MB each", rows),
        table(
            "delta over whole, step by step",
            "model,M parameters,standard deviation,shares",
            (
                (
                    name,
                    one["parameters"] / 1e6,
                    one["standard_deviation"],
                    ", ".join(f"{share:.3f}" for share in one["shares"]),
                )
                for name, one in raw["deltas"].items()
            ),
        ),
        table("arithmetic", list(arithmetic[0]), (list(row.values()) for row in arithmetic)),
    ]
