"""The restricted Pod Security profile of Kubernetes, as a list of what a pod does wrong.

The rules are those of https://kubernetes.io/docs/concepts/security/pod-security-standards/: the
restricted profile, which includes the baseline profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Spec = Mapping[str, Any]

_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
_HOST = ("hostNetwork", "hostPID", "hostIPC")


def violations(pod: Spec) -> list[str]:
    """Every rule of the profile that a pod's spec breaks; empty: it is admitted."""
    return [*_of_the_pod(pod), *(found for one in _containers(pod) for found in _of(one, pod))]


def _containers(pod: Spec) -> list[Spec]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [container for kind in kinds for container in pod.get(kind, [])]


def _of_the_pod(pod: Spec) -> Iterator[str]:
    context = pod.get("securityContext", {})
    yield from (f"{name} is set" for name in _HOST if pod.get(name))
    for volume in pod.get("volumes", []):
        for kind in set(volume) - {"name"} - _VOLUMES:
            yield f"volume {volume['name']} is a {kind}"
    if context.get("sysctls"):
        yield "sysctls are set"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "it is a HostProcess pod"
    yield from _user("the pod", context)
    yield from _profiles("the pod", context)


def _of(container: Spec, pod: Spec) -> Iterator[str]:
    name, context = container["name"], container.get("securityContext", {})
    shared = pod.get("securityContext", {})
    if context.get("privileged"):
        yield f"{name} is privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may escalate its privileges"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield f"{name} does not drop all capabilities"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{name} adds capabilities"
    if not context.get("runAsNonRoot", shared.get("runAsNonRoot")):
        yield f"{name} may run as root"
    if "seccompProfile" not in context and "seccompProfile" not in shared:
        yield f"{name} has no seccomp profile"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield f"{name} has a port of the host"
    if context.get("procMount", "Default") != "Default":
        yield f"{name} has another /proc"
    for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(kind, {})
        if any(probe.get(how, {}).get("host") for how in ("httpGet", "tcpSocket")):
            yield f"{name} probes another host"
    yield from _user(name, context)
    yield from _profiles(name, context)


def _user(name: str, context: Spec) -> Iterator[str]:
    if context.get("runAsUser") == 0:
        yield f"{name} runs as user 0"
    if context.get("runAsNonRoot") is False:
        yield f"{name} says that it may run as root"


def _profiles(name: str, context: Spec) -> Iterator[str]:
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") == "Unconfined":
        yield f"{name} is not confined by seccomp"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield f"{name} is not confined by AppArmor"
    if context.get("seLinuxOptions", {}).keys() & {"user", "role"}:
        yield f"{name} has an SELinux user or role of its own"
