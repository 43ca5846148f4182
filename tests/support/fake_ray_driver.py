"""A driver without Ray: `FAKE_DRIVER=how python -m fake_ray_driver`. It starts no agent.

open: gives room, echoes the controller's address and secret as the loss of an agent, and answers
about joiners. refuse, silent, token, die: does not.
"""

from __future__ import annotations

import os
import sys
import time

from asyncrl.launch.ray import messages


def say(message: messages.FromDriver) -> None:
    sys.stdout.buffer.write(messages.line(message))
    sys.stdout.buffer.flush()


def main() -> None:
    how = os.environ["FAKE_DRIVER"]
    orders = map(messages.TO_DRIVER.decode, sys.stdin.buffer)
    assert isinstance(next(orders), messages.Open)
    if how == "refuse":
        say(messages.Refused("the cluster is too small"))
        return
    say(messages.Stage("an answer of the Ray head", 0.5))
    if how == "token":
        print("RPC error: InvalidAuthToken: missing or incorrect", file=sys.stderr, flush=True)
    if how in ("silent", "token"):
        time.sleep(600)
    if how == "die":
        sys.exit("GCS is not there")
    say(messages.Opened("h:1", "127.0.0.1"))
    given = 0
    for order in orders:
        match order:
            case messages.Serve():
                print("serving", order, file=sys.stderr, flush=True)
            case messages.Reserve(slot=slot):
                given += slot.name != "generator-9"
                reason = "" if slot.name != "generator-9" else "there is no room"
                say(messages.Reserved(slot.name, reason))
            case messages.GiveBack(name=name):
                given -= 1
                print("given back", name, "left", given, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
