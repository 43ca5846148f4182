"""The relay of a node: passes messages, weights and files of its processes between nodes.

    control.py   control messages of this node's processes, gathered on their way
    files.py     files of nodes that do not see the run's folder, copied into it
    setup.py     builds them, dispatches the controller's commands, and reports

A relay decides nothing about tokens. It can be killed and replaced without loss: the generators
continue.
"""
