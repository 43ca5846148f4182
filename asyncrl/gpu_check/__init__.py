"""`asyncrl gpu-check`: the first checks of a GPU in order, each with a limit and a verdict.

`parts` is the table of parts; `command` chooses them, `runner` runs each in a process (`child`),
and the other modules hold their functions. The table, the runner and the child import only the
standard library, so that they work on a machine that lacks packages. Parts need torch 2.11.
"""
