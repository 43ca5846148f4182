"""10^6 hostile frames over all sockets of a live run, and a run that was left alone."""
