"""How a run scales from 8 to 1,024 GPUs, in the simulator: what saturates first.

    python -m benchmarks.scaling [--quick] [--json FILE] [--model 7b] [--gpus 64]

Simulates the modes `sync`, `verify` and `verify, k=1` on H200 GPUs of which a quarter train (at
least as many as hold the optimizer), with links of 100 Gbit/s and weights passed on by a chain of
nodes. Each generator decodes 64 rows and a step fills every row once, so the batch grows with the
GPUs. The first four of eleven steps do not count, nor the last three, in which less is left to run
ahead. Then 256 GPUs of 7B with slower links, deltas, losses and slow generators, and 1,024 GPUs
with the batch of 256.

From the counts of the scheduler's events and commands it derives the messages per second, with
and without relays (what is urgent leaves at once, the rest within 50 ms: `asyncrl.wire.sessions`),
and the share of its capacity that each part uses. The capacities of the controller and of a
trainer's intake are those that `benchmarks.controller` and `benchmarks.delivery` measured
(`benchmarks/results`), on one core of this project's machine. `--quick` stops at 64 GPUs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from asyncrl.simulation.failures import Failures, Stragglers
from asyncrl.simulation.network import Network
from asyncrl.simulation.outcome import Outcome
from asyncrl.simulation.study import Cluster
from asyncrl.wire.sessions.peers import GATHER_SECONDS
from asyncrl.wire.sessions.session import ACK_SECONDS
from benchmarks.harness import parser_of, report, table

GPUS = (8, 64, 256, 1024)
MODES = ("sync", "verify", "verify, k=1")
GPUS_PER_GENERATOR = {"7b": 1, "32b": 2}
"""Two GPUs hold the weights of 32B and the KV of 64 rows."""
MIN_TRAINER_GPUS = {"7b": 1, "32b": 4}
"""16 bytes of weights, gradients and optimizer state a parameter, in 141 GB each."""
LINK = Network(bandwidth_gbit=100, latency_ms=0.1, chunk_mib=8)
REPORTS_PER_SECOND = 2.0
"""Of each generator, next to its samples: what it does now."""
FRAMES_PER_SAMPLE = 4
"""With a frame for each message: finished, start, deliver, delivered."""
MESSAGES_PER_SAMPLE = 4
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What shared parts need for a message, a frame and a trajectory, on one core."""

    message_seconds: float
    """Of the controller's process, per message."""
    frame_seconds: float
    """Of the controller's process, per frame."""
    trajectory_seconds: float
    """Of a trainer's intake, per trajectory of 1,000 tokens without lists."""

    @classmethod
    def measured(cls) -> Capacity:
        """From the results of `benchmarks.controller` and `benchmarks.delivery`.

        Samples that end n at a time cost the controller messages + frames / n.
        """
        controller = json.loads((RESULTS / "cpu-2core-controller.json").read_text())["ratios"]
        together = (1, 8, 32)
        seconds = [1e-6 * controller[f"controller_us_per_sample_{n}"] for n in together]
        frames, messages = np.polyfit([1 / n for n in together], seconds, 1)
        delivery = json.loads((RESULTS / "cpu-2core-delivery-quick.json").read_text())
        (intake,) = (
            row["rank"]["wall_us"]
            for row in delivery["raw"]["lengths"]
            if row["tokens"] == 1000 and row.get("top_k", 0) == 0
        )
        return cls(
            float(messages) / MESSAGES_PER_SAMPLE, float(frames) / FRAMES_PER_SAMPLE, 1e-6 * intake
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One simulated run, and what follows from its counts."""

    model: str
    gpus: int
    trainer_gpus: int
    generators: int
    mode: str
    note: str
    outcome: Outcome
    samples_per_second: float
    messages_per_second: float
    """Into and out of the controller."""
    frames_per_second: float
    """The same, gathered by the relays."""
    controller_alone: float
    """Share of a core that the controller uses if each message has a frame of its own."""
    controller: float
    """Share of a core that it uses with relays."""
    intake: float
    """Share of a core that each trainer node's intake uses."""
    link: float
    """Share of the time in which weights are on a node's link."""
    cpu_seconds: float
    """Of the simulation."""

    @property
    def shares(self) -> dict[str, float]:
        """The share of its capacity that each part uses."""
        return {
            "generators": 1 - self.outcome.generator_idle,
            "trainer": 1 - self.outcome.trainer_idle,
            "controller": self.controller,
            "intake": self.intake,
            "weights": self.link,
        }

    @property
    def first(self) -> str:
        return max(self.shares, key=lambda part: self.shares[part])

    @property
    def first_shared(self) -> str:
        """The first of those that more GPUs do not widen."""
        return max(("controller", "intake", "weights"), key=lambda part: self.shares[part])


def cluster(model: str, gpus: int, **changes: Any) -> Cluster:
    """A quarter of the GPUs train, the others generate."""
    trainer = max(gpus // 4, MIN_TRAINER_GPUS[model])
    each = GPUS_PER_GENERATOR[model]
    size = Cluster(
        model=model, generators=(gpus - trainer) // each, gpus_per_generator=each, steps=11,
        warm_up=4, cool_down=3, rule="block", trainer_devices=trainer, network=LINK,
    )  # fmt: skip
    return replace(size, **changes)


def point(size: Cluster, gpus: int, mode: str, capacity: Capacity, note: str = "") -> Point:
    """Simulate one mode, and derive what the parts have to carry."""
    began = time.process_time()
    outcome = size.simulate(mode)
    seconds = time.process_time() - began
    reports = REPORTS_PER_SECOND * size.generators
    into = outcome.told.get("SampleFinished", 0) + outcome.told["SampleDelivered"] + reports
    into += outcome.told["WeightsInstalled"]
    out = sum(
        rate
        for kind, rate in outcome.commanded.items()
        if kind not in ("DeclareStep", "FinishRun", "ReportGroupFailed")
    )
    nodes = -(-size.generators // size.generators_per_node)
    frames = relayed_frames(outcome, into, out, nodes)
    trainer = round(size.roofline()[1])
    samples = outcome.told["SampleDelivered"]
    sent = size.network.link_seconds(size.weights_bytes * size.network.delta_share)
    message, frame = capacity.message_seconds, capacity.frame_seconds
    return Point(
        size.model, gpus, trainer, size.generators, mode, note, outcome,
        samples_per_second=samples,
        messages_per_second=into + out,
        frames_per_second=frames,
        controller_alone=(into + out) * (message + frame),
        controller=(into + out) * message + frames * frame,
        intake=samples * capacity.trajectory_seconds / size.trainer_nodes,
        link=size.network.fan_out * sent / outcome.step_seconds,
        cpu_seconds=seconds,
    )  # fmt: skip


def relayed_frames(outcome: Outcome, into: float, out: float, nodes: int) -> float:
    """Frames per second between the controller and the relays of so many nodes, both ways.

    Urgent is the report that ends a sample, and an installation. What waits for up to
    `GATHER_SECONDS`: reports of samples that are verified later, deliveries, counts. Commands leave
    at once, and mostly follow from a report of the same node: in one frame.
    """
    ends = outcome.told.get("SampleDelivered", 0.0)
    urgent = (ends + outcome.told["WeightsInstalled"]) / nodes
    waiting = into / nodes - urgent
    from_relays = urgent + waiting / (1 + (urgent + waiting) * GATHER_SECONDS)
    return nodes * (from_relays + min(out / nodes, from_relays) + 1 / ACK_SECONDS)


def variants(capacity: Capacity) -> list[Point]:
    """256 GPUs of 7B with one thing changed, and the batch of 256 GPUs on 1,024."""
    size = cluster("7b", 256)
    changed: dict[str, dict[str, Any]] = {
        "links of 10 Gbit/s": {"network": replace(LINK, bandwidth_gbit=10)},
        "links of 10 Gbit/s, deltas of 25 %": {
            "network": replace(LINK, bandwidth_gbit=10, delta_share=0.25)
        },
        "links of 10 Gbit/s, tree of fan-out 2": {
            "network": replace(LINK, bandwidth_gbit=10, fan_out=2)
        },
        "5 % of the generators 1.5 times as slow": {"stragglers": Stragglers(0.05, 1.5)},
        "every node lost every 2 hours": {"failures": Failures(0.5, "node", 120.0)},
        "trainer lost 10 times an hour": {"failures": Failures(trainer_per_hour=10.0)},
        "another length after a rejection": {"new_length": 1.0},
    }
    points = [point(size, 256, "verify", capacity, "as above")]
    for note, change in changed.items():
        points.append(point(replace(size, **change), 256, "verify", capacity, note))
    fixed = cluster("7b", 1024, groups_per_step=size.step_groups)
    points += [point(fixed, 1024, mode, capacity, "batch of 256 GPUs") for mode in MODES]
    return points


def table_of(points: list[Point], title: str) -> Table:
    rows = []
    for p in points:
        o = p.outcome
        rows.append([
            p.mode + (f"; {p.note}" if p.note else ""), p.model, p.gpus,
            f"{p.gpus - p.trainer_gpus}+{p.trainer_gpus}", f"{o.step_seconds:.1f}",
            f"{o.generator_idle:.0%}", f"{o.trainer_idle:.0%}", f"{p.samples_per_second:,.0f}",
            f"{p.messages_per_second:,.0f}", f"{p.frames_per_second:,.0f}",
            f"{o.data_bytes_per_second / 1e6:.1f}", f"{o.weights_seconds_max:.1f}",
            f"{p.controller_alone:.1%} / {p.controller:.1%}", f"{p.intake:.1%}", f"{p.link:.1%}",
            f"{p.first} {p.shares[p.first]:.0%}",
            f"{p.first_shared} {p.shares[p.first_shared]:.1%}",
        ])  # fmt: skip
    return table(
        title,
        "mode,model,GPUs,generate+train,s/step,gen. idle,train idle,samples/s,messages/s,"
        "frames/s,MB/s to trainer,weights s,controller,intake,link,first,then",
        rows,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "up to 64 GPUs, no variants")
    parser.add_argument("--model", choices=GPUS_PER_GENERATOR, help="only this model")
    parser.add_argument("--gpus", type=int, choices=GPUS, help="only this many GPUs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.gpus = "7b", GPUS[0]
    capacity, points = Capacity.measured(), list[Point]()
    for model in (options.model,) if options.model else GPUS_PER_GENERATOR:
        for gpus in (options.gpus,) if options.gpus else GPUS:
            if not options.quick or gpus <= 64:
                size = cluster(model, gpus)
                points += [point(size, gpus, mode, capacity) for mode in MODES]
    few = options.quick or options.model or options.gpus
    others = [] if few else variants(capacity)
    seconds = {(p.model, p.gpus, p.mode): p.outcome.step_seconds for p in points}
    ratios = {
        f"scaling_sync_over_{mode.replace(', ', '_').replace('=', '')}_{model}_{gpus}": (
            seconds[model, gpus, "sync"] / taken
        )
        for (model, gpus, mode), taken in seconds.items()
        if mode != "sync"
    }
    raw = {
        "capacity": asdict(capacity),
        "points": [asdict(p) | {"shares": p.shares} for p in points + others],
    }
    shown = [table_of(points, "weak scaling: a step fills every row once")]
    shown += [table_of(others, "one thing changed")] if others else []
    report(options, "scaling", raw, ratios, *shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
