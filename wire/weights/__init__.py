"""Policy weights in shared memory: layout, the one writer, the one reader.

    writer.py       the trainer publishes a version into a file under /dev/shm
    layout.py       the layout of such a file, and the manifest that travels on sockets
    reader.py       an engine copies a version into its memory and checks that it is complete
    fingerprint.py  digests of tensors, to compare an engine's weights with the trainer's
    memory.py       tensors over a file's bytes, and page-locked memory, for both sides
    files.py        such files as bytes, without torch
    chunks.py       the pieces in which a version travels to other nodes
    delta.py        the bitwise changes of a chunk since the previous version
    chain/          nodes that receive versions from each other, for engines of other machines
    broadcast/      one process sends to all that stage, with torch.distributed

On other nodes an engine reads the file that `chain` keeps there, or receives a broadcast.
"""
