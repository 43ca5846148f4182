"""The processes in which environments run: the pool, its lanes, a worker and its sessions."""
