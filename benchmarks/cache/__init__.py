"""How fast the cache writes and drafts, and how well, against ArcticInference's and a naive one."""
