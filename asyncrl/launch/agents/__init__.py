"""The launcher of agents: `launcher.kind: agents`.

    controller ══ one CURVE line ══ agent on a machine ── child (asyncrl.child)
                                                            └─ keeper

    secret.py           the file of the shared secret
    gpus.py             the number of GPUs for an agent's child
    agent_state.py      an agent and a process on its machine, as the controller knows them
    registry.py         the agents, their processes and the assignment: a state machine, no sockets
    launcher.py         the controller's side: a launcher and handles
    wait_for_agents.py  waits for the agents that a run begins with
    agent.py            the agent: joins a controller, carries out its orders, leaves
    hosting.py          an agent's children

Decision 0050 says why agents are started separately.
"""
