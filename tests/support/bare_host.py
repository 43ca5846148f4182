"""A process on a node without a controller: `python bare_host.py ORDER_JSON KEYS`, and its child.

It prints where the log is, then the exit code and the end of the log when the child has ended.
"""

from __future__ import annotations

import sys

from asyncrl.launch import node_child


def main() -> None:
    node_child.CHILD_MODULE = "stubborn_child"
    node_child.GRACE_SECONDS = 0.5
    made = node_child.NodeChild()
    place = node_child.Place("n", "10.1.2.3")
    print(made.start(sys.argv[1], sys.argv[2].encode(), place), flush=True)
    code = None
    while code is None:
        code, tail = made.watch(60.0)
    print(code, tail, flush=True)


if __name__ == "__main__":
    main()
