"""The processes of a run: thin shells of sockets, clocks and files around the pure parts."""
