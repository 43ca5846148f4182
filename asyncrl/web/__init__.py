"""The web page of a run, and its HTTP API: one process that watches the run as a user does.

    browsers ──► guard ──► api ──► feed ──► controller_link ──► controller, once a second
                            │        └────► sections ──► files of the run's folder
                            └─ orders ────────────────────────► controller

serving          in the controller: holds the listening socket, starts the process when somebody
                 connects, and again if it was killed
process, server  the process: uvicorn on that socket
guard            who may ask for what, as a pure function; `middleware` applies it to requests
feed             one producer for all watchers
sections         the report's sections, drawn again as the run's files grow

The process holds nothing that training needs. It can be killed at any moment.
"""
