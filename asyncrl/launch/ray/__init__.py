"""`launcher.kind: ray`: agents (`asyncrl.launch.agents`) that Ray starts, one per bundle.

    controller ══ one CURVE line ══ agent ── child (asyncrl.child)
        └─ pipes ── driver ── Ray ── actor ┘     └─ keeper

Decision 0094 says why Ray starts agents, decision 0044 why the controller does not import Ray.
"""
