"""Weights between nodes: a chain of nodes, each of which pulls a version from the one before it.

    trainer's file ── source ──> node ──> node ──> node      each with two files for its engines
                                  (a node passes a chunk on as soon as it has it)

    receiving.py   which chunks to ask of whom, and when to leave a parent   (pure)
    serving.py     which child gets the next chunk                           (pure)
    held.py        chunks of a version, whole or as a delta
    published.py   the versions in the trainer's files
    pace.py        a limit on what a node sends
    sockets.py     ZeroMQ sockets with the run's keys
    source.py      a thread that serves the trainer's files
    node.py        a thread that receives versions and serves them

A *parent* is a node that chunks are asked of; the *parents* of a receiver are in order: its parent,
the parent of that one, and so on up to the source. The *base* of a delta is a version that the
receiver holds. Why a chain: decision 0045.
"""
