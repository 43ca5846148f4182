"""What can refuse a run before a process starts: its model, data, memory, machines and user code.

Nothing here is used once training has begun.
"""
