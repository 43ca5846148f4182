"""The processes that environments run in: the pool, its lanes, a worker and its sessions."""
