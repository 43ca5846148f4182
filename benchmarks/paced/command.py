"""`asyncrl run` whose children are paced: `python -m benchmarks.paced.command run CONFIG ...`."""

from asyncrl.cli import main
from asyncrl.launch import local

if __name__ == "__main__":
    local.CHILD_MODULE = "benchmarks.paced.child"
    local.LocalLauncher.shares_processors = False  # type: ignore[assignment, method-assign]
    main()
