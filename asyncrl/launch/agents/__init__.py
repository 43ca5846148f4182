"""The launcher of agents: `launcher.kind: agents`.

    controller ══ one CURVE line ══ agent on a machine ── child (asyncrl.child)
                                                            └─ keeper

    config.py       the settings `launcher.agents`
    secret.py       the file of the secret that all of them have
    members.py      an agent, a process on its machine
    roster.py       the agents, their processes and who gets which: a state machine without sockets
    launcher.py     the controller's side: a launcher and handles
    gathering.py    waits for the agents that a run begins with
    agent.py        the agent: joins a controller, carries out its orders, leaves
    hosting.py      an agent's children
    line.py         an agent's connection, and why there is none

Decision 0050 says why somebody else starts the agents.
"""
