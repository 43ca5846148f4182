"""A worker without Ray: `python bare_actor.py ORDER_JSON KEYS`, an actor and its child.

It prints where the log is, then the exit code and the end of the log when the child has ended.
"""

from __future__ import annotations

import sys

from asyncrl.launch import node_child
from asyncrl.launch.ray import actor


def main() -> None:
    node_child.CHILD_MODULE = "stubborn_child"
    node_child.GRACE_SECONDS = 0.5
    actor._place = lambda: ("n", "10.1.2.3", ["4", "6"])
    made = actor.ProcessActor()
    print(made.start(sys.argv[1], sys.argv[2].encode()), flush=True)
    code = None
    while code is None:
        code, tail = made.watch(60.0)
    print(code, tail, flush=True)


if __name__ == "__main__":
    main()
