"""Installs the chart and does to it what happens in a cluster: drive.py IMAGE [--storage CLASS]

    install      training begins by itself and reaches step 5; `helm test` passes
    page         through `kubectl port-forward`: the web page, an order, the list for Prometheus
    delete       the generator's pod, then the controller's: training goes on where it was
    scale        two generators are ready
    uninstall    every pod ends in time, and the newest checkpoint is that of the last step
    install      again: training goes on from there

KUBECONFIG names the cluster. Every wait is bounded. The last line is PASS or FAIL with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helm_python.config import Config
from helm_python.errors import HelmError

CHART = Path(os.environ.get("ASYNCRL_CHART", Path(__file__).resolve().parents[3] / "docker/chart"))
NAMESPACE, RELEASE = "asyncrl-test", "asyncrl"
CONTROLLER = f"{RELEASE}-controller-0"
RUN = f"/work/runs/{RELEASE}"
SECONDS = 900.0
"""Longest wait for anything; pulling images is not in it."""
BEGAN = time.monotonic()


class FailedError(Exception):
    """The cluster did not do what it should."""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


def kubectl(*words: str, check: bool = True) -> str:
    done = subprocess.run(
        ["kubectl", "-n", NAMESPACE, *words], capture_output=True, text=True, timeout=SECONDS
    )
    if check and done.returncode:
        raise FailedError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def wait_for(what: str, found: Callable[[], object], seconds: float = SECONDS) -> Any:
    """What `found` returns, as soon as that is true."""
    until = time.monotonic() + seconds
    while not (result := found()):
        if time.monotonic() > until:
            raise FailedError(f"waited {seconds:.0f} s for {what}")
        time.sleep(2)
    return result


def objects(kind: str, component: str = "") -> list[dict[str, Any]]:
    which = f",app.kubernetes.io/component={component}" if component else ""
    selector = f"app.kubernetes.io/instance={RELEASE}{which}"
    text = kubectl("get", kind, "-l", selector, "-o", "json", check=False)
    return list(json.loads(text)["items"]) if text else []


def ready(component: str) -> list[str]:
    """Names of the pods whose containers are all ready, and that are not about to end."""
    return [
        pod["metadata"]["name"]
        for pod in objects("pods", component)
        if "deletionTimestamp" not in pod["metadata"]
        and any(
            one["type"] == "Ready" and one["status"] == "True"
            for one in pod["status"].get("conditions", [])
        )
    ]


def working() -> list[dict[str, Any]]:
    """The run's pods, without those of tests."""
    return objects("pods", "controller") + objects("pods", "generator")


def steps() -> int:
    """How many steps are recorded; 0 if the controller's pod cannot say."""
    text = kubectl(
        *("exec", CONTROLLER, "-c", "controller", "--"),
        *("sh", "-c", f"cat {RUN}/metrics.jsonl 2>/dev/null | wc -l"),
        check=False,
    )
    return int(text) if text.isdigit() else 0


def uid(name: str) -> str:
    return kubectl("get", "pod", name, "-o", "jsonpath={.metadata.uid}", check=False)


def values(image: str, storage: str) -> dict[str, Any]:
    """Small pods, and a run that is long enough."""
    repository, _, tag = image.rpartition(":")
    small = {"requests": {"cpu": "400m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"},
        "config": {
            "run": {"steps": 100_000},
            "engine": {"slots": 16, "max_model_len": 128},
            "scheduler": {"group_size": 4, "groups_per_step": 4},
            "sampling": {"max_tokens": 24},
            "trainer": {"checkpoint_every": 50},
            "evaluation": {"prompts": 8, "samples": 1},
            # A machine that does other work too must not fail this.
            "launcher": {"max_restarts": 100, "agents": {"silence_seconds": 120}},
        },
        "controller": {"resources": small, "terminationGracePeriodSeconds": 300},
        "trainer": {"resources": small},
        "generators": {"resources": small, "terminationGracePeriodSeconds": 90},
        "sharedMemory": "256Mi",
        "storage": {"size": "1Gi", "storageClass": storage or None},
        "monitoring": {"enabled": True},
    }


def install(helm: Config, chosen: dict[str, Any]) -> None:
    helm.install(CHART, RELEASE, chosen, namespace=NAMESPACE, create_namespace=True)


def replaced(component: str, name: str) -> None:
    """Delete a pod; another one comes, gets ready, and the run goes on."""
    old, before = uid(name), steps()
    kubectl("delete", "pod", name, "--wait=false")
    say(f"deleted {name} at step {before}")
    wait_for(f"another pod than {name}", lambda: uid(name) != old)
    others = wait_for(f"a {component} that is ready", lambda: ready(component))
    now = wait_for("two more steps", lambda: (got := steps()) >= before + 2 and got)
    say(f"{', '.join(others)} took its place; step {now}")


@contextlib.contextmanager
def forwarded(*ports: int) -> Iterator[None]:
    """The ports of the controller's pod, on loopback here."""
    words = ["kubectl", "-n", NAMESPACE, "port-forward", f"pod/{CONTROLLER}", *map(str, ports)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def http(url: str, token: str = "", order: bool = False) -> tuple[int, str]:
    """Status and body of the answer; 0 if there is none."""
    request = urllib.request.Request(  # noqa: S310 - of loopback
        url,
        data=b"{}" if order else None,
        headers={"Content-Type": "application/json"}
        | ({"Authorization": f"Bearer {token}"} if token else {}),
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def page() -> None:
    """As docs/deploy.md has it: the link of `asyncrl web`, and a forwarded port."""
    link = kubectl("exec", CONTROLLER, "-c", "controller", "--", "asyncrl", "web")
    parts = urllib.parse.urlsplit(link)
    token = urllib.parse.unquote(parts.fragment.removeprefix("token="))
    if parts.hostname != "127.0.0.1" or not parts.port or not token:
        raise FailedError("`asyncrl web` printed no link")
    address = f"http://{parts.netloc}"
    with forwarded(parts.port, 9099):
        wait_for("the web page", lambda: http(f"{address}/")[0] == 200, 120)
        status = json.loads(http(f"{address}/api/status")[1])
        refused, _ = http(f"{address}/api/orders/checkpoint", order=True)
        taken, said = http(f"{address}/api/orders/checkpoint", token, order=True)
        if refused != 401 or taken != 200:
            raise FailedError(f"an order without the token: {refused}, with it: {taken} {said}")
        listed = json.loads(http("http://127.0.0.1:9099/targets")[1] or "[]")
    processes = sorted(one["labels"]["instance"] for one in listed)
    if not {"controller", "trainer", "generator-0"} <= set(processes):
        raise FailedError(f"Prometheus is told of {processes}")
    say(f"the page is at step {status['step']}, takes an order; Prometheus gets {processes}")


def checkpoints(image: str) -> list[int]:
    """Steps of the checkpoints in the volume, as a pod of its own reads them, and records."""
    claim = f"runs-{CONTROLLER}"
    script = (
        f"import json,pathlib; r=pathlib.Path('{RUN}'); "
        "lines=(r/'metrics.jsonl').read_text().splitlines(); "
        "print(json.dumps([sorted(int(''.join(filter(str.isdigit, p.name))) "
        "for p in (r/'checkpoints').glob('step-*')), len(lines)]))"
    )
    context = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "look", "namespace": NAMESPACE},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "look",
                    "image": image,
                    "command": ["python", "-c", script],
                    "securityContext": context,
                    "volumeMounts": [{"name": "runs", "mountPath": "/work/runs"}],
                }
            ],
            "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}],
        },
    }
    subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=json.dumps(pod), text=True, check=True, timeout=60
    )
    phase = ("get", "pod", "look", "-o", "jsonpath={.status.phase}")
    wait_for("the pod that looks", lambda: kubectl(*phase) in {"Succeeded", "Failed"}, 180)
    text = kubectl("logs", "look")
    kubectl("delete", "pod", "look")
    saved, last = json.loads(text.splitlines()[-1])
    say(f"checkpoints {saved}, records of {last} steps")
    return [*saved, last]


def drive(image: str, storage: str) -> str:
    """The whole test; what it has seen."""
    chosen = values(image, storage)
    with Config(kubeconfig_path=os.environ["KUBECONFIG"], namespace=NAMESPACE) as helm:
        install(helm, chosen)
        say("installed")
        wait_for("step 5", lambda: steps() >= 5)
        say(f"step {steps()}: {', '.join(ready('controller') + ready('generator'))}")
        helm.test(RELEASE, timeout=290)
        say("helm test passed")
        page()
        (generator,) = [pod["metadata"]["name"] for pod in objects("pods", "generator")]
        replaced("generator", generator)
        replaced("controller", CONTROLLER)
        kubectl("scale", "deployment", f"{RELEASE}-generator", "--replicas=2")
        pair = wait_for(
            "two generators", lambda: len(ready("generator")) == 2 and ready("generator")
        )
        say(f"scaled: {', '.join(pair)}")
        before = steps()
        wait_for("two more steps", lambda: steps() >= before + 2)
        helm.uninstall(RELEASE)
        say("uninstalled")
        wait_for("the end of all pods", lambda: not working(), 330)
        say("all pods have ended")
        *saved, last = checkpoints(image)
        if last not in saved:
            raise FailedError(f"the last step is {last}, and the checkpoints are those of {saved}")
        install(helm, chosen)
        wait_for(f"step {last + 2}", lambda: steps() >= last + 2)
        say(f"installed again: goes on from step {last}, now {steps()}")
        helm.uninstall(RELEASE)
        wait_for("the end of all pods", lambda: not working(), 330)
    return f"step 5, each pod deleted, two generators, checkpoint of step {last}, and on from it"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("image", help="NAME:TAG, as the nodes have it or can pull it")
    parser.add_argument("--storage", default="", help="storage class of the run's volume")
    asked = parser.parse_args()
    try:
        seen = drive(asked.image, asked.storage)
    except (FailedError, HelmError, subprocess.TimeoutExpired) as error:
        print(kubectl("get", "pods", "-o", "wide", check=False))
        print(kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-4000:])
        for container in ("controller", "trainer"):
            text = kubectl("logs", CONTROLLER, "-c", container, "--tail=30", check=False)
            print(f"--- {container}\n{text}")
        print(f"FAIL: {error}")
        return 1
    print(f"PASS in {time.monotonic() - BEGAN:.0f} s: {seen}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
