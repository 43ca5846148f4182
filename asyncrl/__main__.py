"""`python -m asyncrl` is the command line."""

from asyncrl.cli import main

main()
