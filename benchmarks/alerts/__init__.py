"""Alerts raised by injected faults: real runs, a real Prometheus, rules with shorter times.

faults    what is done to a run, and which alerts follow
child     the faults inside of a trainer or a generator
reward    those of a reward function
command   `asyncrl run` with these children
main      one run for each fault, and a table
"""
