"""Waits until the controller of this pod has ended: after_controller.py SECONDS."""

import socket
import sys
import time

until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    try:
        socket.create_connection(("127.0.0.1", 5990), timeout=5).close()
    except ConnectionRefusedError:
        break
    except OSError:
        pass
    time.sleep(1)
