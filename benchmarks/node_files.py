"""How fast one relay copies the files of another: `python -m benchmarks.node_files [--json FILE]`.

Two processes on this machine, TCP over loopback with CURVE. The floor is the same file copied by
the system. A round trip of a real network is not in it: a node's files come at 1 MiB for each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import msgspec

from asyncrl.launch.child_spec import files_hub
from asyncrl.relay import pull
from asyncrl.relay.files import RelayFiles
from asyncrl.wire import RunKey
from asyncrl.wire.messages import files, from_relay, to_relay
from benchmarks.harness import parser_of, pick, report

LOG = "logs/generator-0.log"
MEGABYTES = 256


async def serve(root: Path, key: RunKey) -> None:
    """The other node's relay, until its standard input ends."""
    relay = RelayFiles(
        root,
        shares=False,
        address="tcp://127.0.0.1:*",
        keys=key.hub(files_hub("relay-1")),
        say=lambda _message: None,
    )
    print(msgspec.json.encode(relay.ready).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    print(time.process_time(), flush=True)


async def copy(run: Path, key: RunKey, ready: from_relay.FilesReady) -> float:
    server = files.Server("relay-1", ready.address, key.line(files_hub("relay-1"), "relay-0"))
    puller = pull.Puller(run)
    began = time.perf_counter()
    puller.follow((to_relay.FileSource(server, ready.folder, ("generator-0",)),))
    left = await puller.finish(600.0)
    seconds = time.perf_counter() - began
    puller.close()
    if left:
        raise RuntimeError(str(left))
    return seconds


def measure(megabytes: int) -> dict[str, float]:
    """MB/s, and seconds of CPU of each end for so many."""
    key = RunKey.new()
    with tempfile.TemporaryDirectory() as folder:
        node, run = Path(folder) / "node", Path(folder) / "run"
        run.mkdir()
        (node / "logs").mkdir(parents=True)
        (node / LOG).write_bytes(os.urandom(1_000_000) * megabytes)
        began = time.perf_counter()
        shutil.copyfile(node / LOG, run / "floor")
        floor = time.perf_counter() - began
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.node_files", "--serve", str(node)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(key.secret.hex().encode() + b"\n")
            child.stdin.flush()
            ready = msgspec.json.decode(child.stdout.readline(), type=from_relay.FilesReady)
            before = time.process_time()
            with mock.patch.object(pull, "BYTES_PER_SECOND", 1e12):
                seconds = asyncio.run(copy(run, key, ready))
            own = time.process_time() - before
            child.stdin.close()
            served = float(child.stdout.readline())
            child.wait(30)
    return {
        "megabytes": megabytes,
        "copied_mb_per_s": megabytes / seconds,
        "floor_mb_per_s": megabytes / floor,
        "copying_cpu_seconds": own,
        "serving_cpu_seconds": served,
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "a quarter of the bytes")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.serve is not None:
        key = RunKey(bytes.fromhex(sys.stdin.buffer.readline().decode()))
        asyncio.run(serve(options.serve, key))
        return 0
    measured = measure(pick(options, MEGABYTES, MEGABYTES // 4, 1))
    report(options, "node_files", {}, {name: round(v, 2) for name, v in measured.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
