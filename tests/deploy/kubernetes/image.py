"""Writes image archives without Docker: image.py {pause,archive} ...

    image.py pause OUT                      the image of pod sandboxes, compiled with gcc
    image.py archive ROOTFS NAME:TAG OUT    an image of asyncrl from a folder with all its files

`docker save` writes such archives too.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PAUSE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int s) { _exit(0); }
static void reap(int s) { while (waitpid(-1, 0, WNOHANG) > 0); }
int main(void) {
  signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, reap);
  for (;;) pause();
}
"""
ASYNCRL = {
    "User": "10001",
    "WorkingDir": "/work",
    "Entrypoint": ["asyncrl"],
    "Env": ["PATH=/opt/asyncrl/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONUNBUFFERED=1"],
}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def archive(rootfs: Path, name: str, config: dict[str, Any], out: Path) -> None:
    """The format of `docker save`: one layer."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        layer = Path(folder) / "layer.tar"
        subprocess.run(
            ["tar", "-C", rootfs, "--owner=0", "--group=0", "-cf", layer, "."], check=True
        )
        described = {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest(layer)}"]},
        }
        text = json.dumps(described).encode()
        file = f"{hashlib.sha256(text).hexdigest()}.json"
        manifest = [{"Config": file, "RepoTags": [name], "Layers": ["0/layer.tar"]}]
        with tarfile.open(out, "w") as whole:
            for member, content in ((file, text), ("manifest.json", json.dumps(manifest).encode())):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                whole.addfile(info, io.BytesIO(content))
            whole.add(layer, "0/layer.tar")


def main() -> None:
    kind, *words = sys.argv[1:]
    if kind == "pause":
        with tempfile.TemporaryDirectory() as folder:
            source, rootfs = Path(folder) / "pause.c", Path(folder) / "rootfs"
            source.write_text(PAUSE, encoding="utf-8")
            rootfs.mkdir()
            subprocess.run(["gcc", "-static", "-Os", "-o", rootfs / "pause", source], check=True)
            archive(
                rootfs, "docker.io/library/pause:test", {"Entrypoint": ["/pause"]}, Path(words[0])
            )
    else:
        archive(Path(words[0]), words[1], ASYNCRL, Path(words[2]))


if __name__ == "__main__":
    main()
