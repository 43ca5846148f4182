"""The processes of a run, as its controller sees them, and the weights between their nodes."""
