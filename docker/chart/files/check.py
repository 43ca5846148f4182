"""`helm test`: a pod of the run finds the controller and sees it train: check.py HOST."""

import socket
import sys
import time
import urllib.error
import urllib.request

HOST, SECONDS = sys.argv[1], 270.0
"""`helm test` waits five minutes by default."""


def trouble() -> str:
    """Why the run does not train, as far as one can see from here; empty: it does."""
    try:
        socket.create_connection((HOST, 5900), timeout=5).close()
        urllib.request.urlopen(f"http://{HOST}:5990/readyz", timeout=5).close()
    except urllib.error.HTTPError:
        return (
            f"{HOST}:5900 takes connections, but the run does not train: read the controller's log"
        )
    except OSError as error:
        return f"{HOST} is not reached: {error}"
    return ""


until = time.monotonic() + SECONDS
while found := trouble():
    if time.monotonic() > until:
        sys.exit(f"FAIL: after {SECONDS:.0f} s {found}")
    time.sleep(2)
sys.stdout.write("PASS: agents reach the controller, and the run trains\n")
