"""A policy's forward and backward pass: loading, packing, attention, the head, and their memory."""
