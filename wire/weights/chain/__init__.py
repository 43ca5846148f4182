"""Weights between nodes: a chain of nodes, each of which pulls a version from the one before it.

    trainer's file ── source ──> node ──> node ──> node      each with two files for its engines
                             (a node passes a chunk on as soon as it has it)

`receiving` and `serving` decide, without I/O, which chunks to ask of which parent and which child
gets the next one. A *parent* is a node that chunks are asked of; the *parents* of a receiver are in
order: its parent, the parent of that one, and so on up to the source. The *base* of a delta is a
version that the receiver holds. Why a chain: decision 0045.
"""
