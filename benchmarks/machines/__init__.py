"""Several machines on this one, for faults that need more than one.

    namespaces.py   machines: own network, processes, memory and temporary files; a switch between
    ray.py          a real Ray cluster on them

Needs root on Linux. All of it ends with the process that made it, also if that is killed: a machine
is its namespaces, and these go when the first process in them does.
"""
