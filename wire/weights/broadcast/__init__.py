"""Weights by broadcast: all processes that stage a version receive it at once from the trainer's.

    trainer's file ── sender ══ gloo or NCCL ══> every process that stages
                        └─ desk: check-ins by version, and their groups   (TCPStore)

A *member* is a process that stages: a torch engine, or a rank of vLLM or SGLang. It checks in for a
version; the sender waits for those that received the previous version, at most `Limits.window`
seconds, forms a group with those that have come, and sends. Late members get a separate broadcast.
If a member dies or is too slow, the group ends, all of them read the file, and the next broadcast
has a new group. The trainer never waits for any of this.

The sockets have neither keys nor encryption (SECURITY.md).
"""
