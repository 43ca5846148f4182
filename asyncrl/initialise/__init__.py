"""`asyncrl init`: the files that a run of one's own begins with."""
