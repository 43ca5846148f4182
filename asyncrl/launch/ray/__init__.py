"""`launcher.kind: ray`: agents (`asyncrl.launch.agents`) that Ray starts, a bundle for each.

    controller ══ one CURVE line ══ agent ── child (asyncrl.child)
        └─ pipes ── driver ── Ray ── actor ┘     └─ keeper

Decision 0094 says why Ray starts agents, decision 0044 why it is kept out of the controller.
"""
