"""A broker without Ray: `FAKE_BROKER=how python -m fake_broker`. It starts no process.

open: gives room, and says what happens to a process that is started. refuse, silent, token, die:
does not.
"""

from __future__ import annotations

import json
import os
import sys
import time

from asyncrl.launch.nodes import NodeInfo
from asyncrl.launch.ray import messages

NODE = NodeInfo(
    "b2", "10.0.0.2", "two", "m", "3.11", "1", shares_run_directory=True, has_model=True
)


def main() -> None:
    how = os.environ["FAKE_BROKER"]
    incoming = messages.read_all(sys.stdin.buffer, messages.TO_BROKER)
    asked = next(incoming)
    out = sys.stdout.buffer
    if how == "refuse":
        messages.write(out, messages.Refused("the cluster is too small"))
        return
    messages.write(out, messages.Stage("an answer of the Ray head", 0.5))
    if how == "token":
        print("RPC error: InvalidAuthToken: missing or incorrect", file=sys.stderr, flush=True)
    if how in ("silent", "token"):
        time.sleep(600)
    if how == "die":
        sys.exit("GCS is not there")
    messages.write(out, messages.Opened("h:1", "10.0.0.1", (NODE,) * len(asked.slots)))
    for order in incoming:
        if isinstance(order, messages.Start):
            spec = json.loads(order.order)["spec"]
            log = f"/asyncrl-{spec['run_id']}/logs/{order.name}.log"
            status = messages.Status(order.name, None, "", f"{spec['threads']}", log, NODE)
            messages.write(out, status)
            if order.name == "trainer":
                lost = messages.Status(order.name, -9, "its Ray actor was lost: gone", "", log)
                messages.write(out, lost)
        elif isinstance(order, messages.End):
            code = -9 if order.by_force else 0
            messages.write(out, messages.Status(order.name, code, "", "the end", ""))
    if how == "head":
        messages.write(out, messages.HeadLost("the head is silent"))


if __name__ == "__main__":
    main()
