"""The launcher of agents: `launcher.kind: agents`.

    controller ══ one CURVE line ══ agent on a machine ── child (asyncrl.child)
                                                            └─ keeper

    secret.py           the file of the secret that all of them have
    agent_state.py      an agent, a process on its machine
    registry.py         the agents, their processes, the assignment: a state machine, no sockets
    launcher.py         the controller's side: a launcher and handles
    wait_for_agents.py  waits for the agents that a run begins with
    agent.py            the agent: joins a controller, carries out its orders, leaves
    hosting.py          an agent's children

Decision 0050 says why asyncrl does not start the agents. Ray can do so (`asyncrl.launch.ray`).
"""
