"""Transport of bytes between processes: addresses, keys, limits, decoding and refusals."""
