"""Launchers: one interface to start, watch and end the processes of a run."""

from asyncrl.launch.interface import Launcher, ProcessHandle
from asyncrl.launch.local import LocalLauncher

__all__ = ["Launcher", "LocalLauncher", "ProcessHandle"]
