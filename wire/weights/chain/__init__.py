"""Weights between nodes: a chain of nodes, each of which pulls a version from the one before it.

    trainer's file ── source ──> node ──> node ──> node      each with two files for its engines
                             (a node passes a chunk on as soon as it has it)

    receiving.py       which chunks to ask of which parent, and when to leave it   (pure)
    serving.py         which child gets the next chunk                             (pure)
    cached_version.py  chunks of a version, whole or as a delta
    sockets.py         ZeroMQ sockets with the run's keys
    thread.py          a thread that serves versions, with a limit of its rate
    source.py          a thread that serves the trainer's files
    node.py            a thread that receives versions and serves them

A *parent* is a node that chunks are asked of; the *parents* of a receiver are in order: its parent,
the parent of that one, and so on up to the source. The *base* of a delta is a version that the
receiver holds. Why a chain: decision 0045.
"""
