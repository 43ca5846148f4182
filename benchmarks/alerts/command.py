"""`asyncrl run` whose children can be told to fail."""

from asyncrl.cli import main
from asyncrl.launch import local

if __name__ == "__main__":
    local.CHILD_MODULE = "benchmarks.alerts.child"
    main()
