"""Checks a run before any process starts: model, data, memory, machines and user code.

Nothing here is used once training has begun.
"""
