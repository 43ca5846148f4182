"""How users watch and steer an active run: control socket, commands, status stream, signals."""
