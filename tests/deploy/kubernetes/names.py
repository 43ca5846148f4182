"""The DNS of a test cluster: answers for pods behind services without an address of their own.

names.py KUBECONFIG ADDRESS. It asks the API server for endpoints every second.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
import urllib.request
from pathlib import Path

import yaml

table: dict[str, list[str]] = {}


def follow(kubeconfig: str) -> None:
    """Keep the table as the cluster's endpoints are."""
    config = yaml.safe_load(Path(kubeconfig).read_text(encoding="utf-8"))
    server = config["clusters"][0]["cluster"]["server"]
    asked = urllib.request.Request(  # noqa: S310 - of this machine
        f"{server}/api/v1/endpoints",
        headers={"Authorization": f"Bearer {config['users'][0]['user']['token']}"},
    )
    unverified = ssl._create_unverified_context()  # noqa: S323 - in a namespace of its own
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=5, context=unverified) as answer:  # noqa: S310
                found: dict[str, list[str]] = {}
                for one in json.load(answer)["items"]:
                    about = one["metadata"]
                    place = f"{about['name']}.{about['namespace']}.svc.cluster.local"
                    for part in one.get("subsets") or []:
                        for address in part.get("addresses") or []:
                            found.setdefault(place, []).append(address["ip"])
                            if "hostname" in address:
                                found[f"{address['hostname']}.{place}"] = [address["ip"]]
                table.clear()
                table.update(found)
        except OSError as error:
            print(error, flush=True)
        time.sleep(1)


def reply(query: bytes) -> bytes:
    """To one question; only addresses of four bytes are known."""
    end, labels = 12, []
    while query[end]:
        labels.append(query[end + 1 : end + 1 + query[end]].decode("ascii", "replace"))
        end += query[end] + 1
    kind, question = query[end + 1 : end + 3], query[12 : end + 5]
    name = ".".join(labels).lower()
    found = table.get(name, [])
    answers = [
        b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x01\x00\x04" + socket.inet_aton(ip)
        for ip in found
        if kind == b"\x00\x01"
    ]
    flags = b"\x84\x00" if found else b"\x84\x03"
    count = len(answers).to_bytes(2, "big")
    return (
        query[:2] + flags + b"\x00\x01" + count + b"\x00\x00\x00\x00" + question + b"".join(answers)
    )


if __name__ == "__main__":
    threading.Thread(target=follow, args=(sys.argv[1],), daemon=True).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as served:
        served.bind((sys.argv[2], 53))
        while True:
            asked, who = served.recvfrom(1024)
            try:
                served.sendto(reply(asked), who)
            except (IndexError, UnicodeDecodeError):
                continue
