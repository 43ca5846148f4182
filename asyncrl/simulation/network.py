"""The network between nodes: latencies of messages, trajectories and weights.

Weights leave the trainer's node when they are published, and pass from node to node in chunks, each
passed on as soon as it has arrived (docs/modes.md). A node at depth d has all of them after

    d * latency  +  fan_out * (bytes + (d - 1) * chunk) / bandwidth

since a node sends each chunk to `fan_out` others through one link. With `fan_out` 1 the nodes form
a chain. The trainer's node has depth 0.
"""

from dataclasses import dataclass

BYTES_PER_TOKEN = 9
"""Bytes of a token in a trajectory to the trainer: id 4, log-probability 4, provenance 1."""
_BITS = 8


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes, and the links between them. The default takes no time."""

    bandwidth_gbit: float | None = None
    """Bandwidth of a node's link, in each direction, in Gbit/s; None: infinite."""
    latency_ms: float = 0.0
    """One way, between two nodes, in ms; added to the time of a message."""
    gpus_per_node: int = 8
    fan_out: int = 1
    chunk_mib: float = 1.0
    delta_share: float = 1.0
    """Bytes sent to a node that has the previous version, as a share of the whole weights."""

    @property
    def latency_seconds(self) -> float:
        """Additional seconds of a message between two nodes."""
        return self.latency_ms * 1e-3

    def link_seconds(self, size: float) -> float:
        """Return the seconds of `size` bytes on one link."""
        if self.bandwidth_gbit is None:
            return 0.0
        return size * _BITS / (self.bandwidth_gbit * 1e9)

    def depth(self, node: int) -> int:
        """Return the links between the trainer's node and this one; nodes go breadth first."""
        if self.fan_out == 1:
            return node + 1
        depth, first, width = 1, 0, self.fan_out
        while node >= first + width:
            first, width, depth = first + width, width * self.fan_out, depth + 1
        return depth

    def weights_seconds(self, node: int, size: float) -> float:
        """Return the seconds from publication until a node has an update of `size` bytes in all."""
        depth = self.depth(node)
        chunk = min(self.chunk_mib * 2**20, size) * self.delta_share
        sent = self.fan_out * (size * self.delta_share + (depth - 1) * chunk)
        return depth * self.latency_seconds + self.link_seconds(sent)

    def fetch_seconds(self, size: float) -> float:
        """Return the seconds in which a node without weights gets all from a neighbour."""
        return self.latency_seconds + self.link_seconds(size)
