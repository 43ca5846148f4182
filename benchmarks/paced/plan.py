"""Which paced runs are made."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paced.pace import Scale
from benchmarks.paced.setting import KEEP_4, MODES, SYNC, VERIFY, Machine, Paced

GENERATORS = (1, 2, 4)
FULL_STEPS = 28


def quick() -> list[Paced]:
    """Every mode with one generator, and the decisive modes with two and four."""
    runs = [Paced(mode) for mode in MODES]
    return runs + [
        Paced(mode, generators) for generators in GENERATORS[1:] for mode in (SYNC, KEEP_4, VERIFY)
    ]


def smoke() -> list[Paced]:
    scale = Scale(250.0, 2.0, 1.0)
    return [Paced(VERIFY, scale=scale, slots=8, fills=2, steps=6, first=2, last=1)]


def full() -> list[Paced]:
    """More steps; also other costs of training, another device and model, scale and dilation."""
    longer = [
        replace(Paced(mode, generators), steps=FULL_STEPS)
        for generators in GENERATORS
        for mode in MODES
    ]
    one = longer[: len(MODES)]
    base = one[0].scale
    return [
        *longer,
        *(replace(paced, training=share) for share in (2.0, 0.5) for paced in one),
        *(replace(paced, machine=Machine("h100", "1.5b")) for paced in one),
        *(replace(paced, scale=replace(base, lengths=base.lengths / 2)) for paced in one),
        *(replace(paced, scale=replace(base, dilation=1.0)) for paced in one),
    ]
