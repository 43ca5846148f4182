"""The command line: `asyncrl init|run|doctor|status|stop|pause|resume|scale|report|eval|...`.

Exit codes: 0 done, or stopped by the user; 1 the run failed; 2 the user must change something; 130
ended at once by a second Ctrl-C. Commands import their dependencies when called, so that `--help`
is fast.

    app       the command line itself, and the options that several commands have
    training  init, run, eval, export, simulate
    watching  status, report, watch, logs, samples, list, compare, web
    steering  orders to an active run: pause, resume, drain, checkpoint, set, scale, stop
    machine   doctor, gpu-check
    agents    agent, agent-key, health
    entry     the entry point: set-up before a command, errors as a paragraph and an exit code
"""

from asyncrl.cli.entry import main

__all__ = ["main"]
