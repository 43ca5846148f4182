"""Policy weights in shared memory: layout, the one writer, the one reader.

    writer.py       the trainer publishes a version into a file under /dev/shm
    layout.py       what such a file looks like, and the manifest that travels on sockets
    reader.py       an engine copies a version into memory of its own and checks that it is whole
    fingerprint.py  digests of tensors, to compare what an engine holds with the trainer's
    views.py        tensors over a file's bytes, for both sides
    files.py        such files as bytes, without torch
    chunks.py       the pieces in which a version travels to other nodes
    delta.py        what changed in a chunk since the version before, bit for bit
    chain/          nodes that receive versions from each other, for engines of other machines
    broadcast/      one process sends to all that stage, with torch.distributed
    pinning.py      page-locked memory, for processes with a GPU

An engine uses the copy in two steps: `stage_weights` reads it while tokens are being generated,
`install_weights` swaps it in (`asyncrl.engine.protocol`). On other nodes they do the same with the
file that `chain` keeps there. A manifest that names a sender is received from it, in the same two
steps.
"""
