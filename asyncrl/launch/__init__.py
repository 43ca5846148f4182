"""Launchers: start, watch and end the processes of a run, and divide the machine among them.

    interface.py        the interface of a launcher
    local.py            the launcher of this machine; ray/ and agents/ have the others
    child_spec.py       the inputs of a child process: spec and keys
    process_startup.py  the start that generator and trainer processes share
    node_child.py       a child on another node, with its keeper (orphan_reaper.py)
    nodes.py            which nodes are one machine, and which are unfit
    identity.py         identifies processes
    records.py          the processes that a run has started, so that leftovers can be ended
    shared_memory.py    files in memory: names and removal
    gpus.py             the machine's GPUs
    placement.py        the GPUs of each process

Imports nothing: a reward worker's supervisor, which must start quickly, loads this package.
"""
