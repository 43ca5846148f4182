"""The web page of a run, and its HTTP API: one process that watches the run as a user does.

    browsers ──► guard ──► api ──► feed ──► controller_link ──► controller, once a second
                            │        └────► sections ──► files of the run's folder
                            └─ orders ────────────────────────► controller

serving          in the controller: holds the listening socket, starts the process at the first
                 connection, and again if it was killed
process, server  the process: uvicorn on that socket
guard            decides about a request, as a pure function; `middleware` applies it
feed             one producer for all watchers
sections         the report's sections, drawn again as the run's files grow

Training does not depend on this process, which can be killed at any moment.
"""
