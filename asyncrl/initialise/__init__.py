"""`asyncrl init`: writes the files that a new run begins with."""
