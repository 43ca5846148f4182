"""The launcher of a Ray cluster: `launcher.kind: ray`.

    controller ── pipes ── broker ── Ray ── actor on a node ── child (asyncrl.child)
                                                 └─ keeper

    config.py      the settings `launcher.ray`
    launcher.py    the controller's side: a launcher and handles; never waits for Ray
    opening.py     starts the broker and waits, stage by stage, until the cluster has room
    messages.py    what goes over the pipes
    broker.py      the only process of a run that imports Ray as a driver
    cluster.py     its calls to Ray: placement group, actors
    head.py        whether the head answers and this machine is its node
    actor.py       one per process of the run, in a Ray worker; needs the standard library only
    keeper.py      ends what an actor's child leaves behind, also after the actor was killed
    nodes.py       what is asked of the nodes, and why a cluster is refused

Decision 0044 says why Ray is kept out of the controller's process.
"""
