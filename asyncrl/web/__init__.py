"""The web page of a run, and its HTTP API: one process that watches the run as a user does.

    browsers ──► guard ──► api ──► feed ──► controller_link ──► controller, once a second
                            │        └────► sections ──► files of the run's folder
                            └─ orders ────────────────────────► controller

In the controller, `serving` holds the listening socket, and starts the process (`process`,
`server`) at the first connection. Training does not depend on it: it can be killed at any moment.
"""
