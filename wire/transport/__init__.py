"""How bytes get from one process to another: addresses, keys, limits, decoding and refusals."""
