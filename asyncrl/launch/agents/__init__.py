"""The launcher of agents: `launcher.kind: agents`.

    controller ══ one CURVE line ══ agent on a machine ── child (asyncrl.child)
                                                            └─ keeper

Decision 0050 says why asyncrl does not start the agents. Ray can do so (`asyncrl.launch.ray`).
"""
