"""Users' access to an active run: control socket, commands, status stream, signals."""
