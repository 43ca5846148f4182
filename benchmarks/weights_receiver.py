"""A process that reads versions of weights into memory of its own, for benchmarks.

python -m benchmarks.weights_receiver      a manifest for each line, as JSON
"""

from __future__ import annotations

import sys

import msgspec
import torch

from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer


def main() -> None:
    torch.set_num_threads(1)
    buffer = WeightBuffer()
    print("ready", flush=True)
    for line in sys.stdin:
        buffer.read(msgspec.json.decode(line, type=WeightManifest))
        print("done", flush=True)


if __name__ == "__main__":
    main()
