"""Policy weights in shared memory: layout, the one writer, the one reader.

On other nodes an engine reads the file that `chain` keeps there, or receives a broadcast.
"""
