"""`asyncrl gpu-check`: the first checks of a GPU in order, each with a limit and a verdict.

    parts       what there is to check: a table, and what a part is given and says
    command     chooses parts, says and writes verdicts
    runner      runs parts one after the other, each in a process with a limit
    child       that process
    record      the JSON and the page of a check
    machine     parts: driver, compiler
    drawing     parts: kernels, draws
    generating  parts: engine, noise floor, weights, vLLM, SGLang
    training    parts: trainer, attention
    two_ranks   parts: nccl, ranks
    whole_run   part: run

The table, the runner and the child import only the standard library, so that they work on a machine
that lacks packages. The parts' imports work with torch 2.11 and newer.
"""
