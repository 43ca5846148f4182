"""The user's name for the network that connects a trainer's ranks. Light: no torch.

>>> network_of("10.1.2.3/16"), network_of("eth0")
('10.1.0.0/16', 'eth0')
>>> is_loopback("lo"), is_loopback("127.0.0.0/8"), is_loopback("10.1.0.0/16")
(True, True, False)
"""

import ipaddress
import re

LOOPBACK = "lo"
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,15}")


def network_of(text: str) -> str:
    """Normalise an interface or addresses like 10.1.0.0/16. Raises ValueError if it is neither."""
    if "/" in text:
        return str(ipaddress.ip_network(text, strict=False))
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if _NAME.fullmatch(text):
            return text
        raise ValueError(
            f"{text!r} is neither the name of a network interface (eth0) nor a range of addresses "
            "(10.1.0.0/16)"
        ) from None
    size = 24 if address.version == 4 else 64
    raise ValueError(
        f"{text} is the address of a single machine; name the network that connects the ranks, "
        f"for example {ipaddress.ip_network((address, size), strict=False)}"
    )


def is_loopback(network: str) -> bool:
    """Return True if no other machine reaches listeners in this network (see `network_of`)."""
    if "/" in network:
        return ipaddress.ip_network(network).is_loopback
    return network == LOOPBACK


def apart(where: str, network: str) -> str:
    """Error text: ranks are on several machines, but the network is one machine's own."""
    return (
        f"{where}, and trainer.rank_network: {network} reaches no other machine. Name the network "
        "that connects them (an interface like eth0, or addresses like 10.1.0.0/16), and say with "
        "launcher.trusted_network: true that you trust everyone in it, since gloo and NCCL have "
        "neither keys nor encryption; or keep all ranks on one machine"
    )
