"""`python -m asyncrl` is the command line."""

import sys
from pathlib import Path

if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
    del sys.path[0]  # a user's types.py or tokenizers.py there is not meant for us

from asyncrl.cli import main

main()
