"""What commands print to."""

from __future__ import annotations

import os
import sys

from rich.console import Console


class TerminalConsole(Console):
    """Prints while somebody reads: a pipe that is closed (`| head`) does not end a run."""

    def on_broken_pipe(self) -> None:
        """Discard what is printed from now on, instead of ending the process."""
        self.quiet = True
        discarded = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discarded, sys.stdout.fileno())
        os.close(discarded)
