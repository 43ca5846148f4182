"""Upper bounds that settings of several packages share: values above them cannot be meant."""

from __future__ import annotations

WEEK_SECONDS = 7 * 24 * 3600
"""Longest limit of a wait."""
START_SECONDS = 1800.0
"""Default limit of a start. vLLM's own is 600 s, which the weights of a large model on a network
disk, compilation and CUDA graphs exceed together."""
MAX_THREADS = 1024
"""Most threads of a process for tensor operations: more than the cores of any machine."""
MAX_TOKENS = 1 << 24
"""Most tokens of one sequence or one step: 16 times the longest context in use."""
MAX_STEPS = 10**9
"""Most optimizer steps."""
MAX_STOP_BYTES = 256
"""Of all stop strings together, in UTF-8. Each byte is a state of the automaton over tokens."""
