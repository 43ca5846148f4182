"""Weights by broadcast: all who stage a version receive it at once, from the trainer's process.

    trainer's file ── sender ══ gloo or NCCL ══> every process that stages
                        └─ desk: who asks, for which version, in which group   (TCPStore)

    meeting.py     who takes part in the next broadcast, and when it begins   (pure)
    desk.py        the place where members check in and are answered, from both sides
    groups.py      a group of torch.distributed, apart from every other one of its process
    words.py       what the sender says before each chunk
    sending.py     a thread in the trainer's process
    receiving.py   what `WeightBuffer.read` calls if the manifest names a sender

A *member* is a process that stages: a torch engine, or a rank of vLLM or SGLang. It checks in for a
version; the sender waits for those that received the version before, at most `Limits.window`
seconds, forms a group with whoever has come, and sends. Who comes later gets a broadcast of its
own. If a member dies or is too slow, the group ends for all of them, they read the file as if there
were no sender, and the next broadcast has a new group. The trainer never waits for any of this.

The sockets have neither keys nor encryption: decision 0045 and SECURITY.md.
"""
