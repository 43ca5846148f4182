"""Launchers: start, watch and end the processes of a run, and divide the machine among them.

    interface.py        what a launcher is
    local.py            the launcher of this machine
    identity.py         which process is which
    records.py          the processes that a run has started, so that leftovers can be ended
    config.py           the section `launcher` of a run's configuration
    gpus.py             which GPUs the machine has
    placement.py        which GPUs each process gets
    parent_death.py     a process that ends with the one that started it

Imports nothing itself: a reward worker's supervisor, which must start quickly, loads this package.
"""
