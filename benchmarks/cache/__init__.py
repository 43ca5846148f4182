"""Speed and quality of the cache, compared with ArcticInference's and a naive one."""
