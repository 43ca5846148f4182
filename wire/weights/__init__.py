"""One version of all weights in shared memory: its layout, its writer, its reader."""
