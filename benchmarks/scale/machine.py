"""The constants of the model as a machine file for `p2pfl simulate --virtual --machine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.scale.launches import SMALL
from benchmarks.scale.model import Model, Record

NAMES = {
    "host_memory": ("shared", "host"),
    "peer_memory": ("private", "peer"),
    "neighbor_memory": ("private", "neighbor"),
    "peer_descriptors": ("descriptors", "peer"),
    "neighbor_descriptors": ("descriptors", "neighbor"),
    "peer_tasks": ("threads", "peer"),
    "neighbor_connections": ("connections", "neighbor"),
    "start_seconds": ("warm", "host"),
}
"""Keys of the file that are one constant: quantity and term."""
COUNTS = ("peer_descriptors", "neighbor_descriptors", "peer_tasks", "neighbor_connections")


def constants(model: Model, records: Sequence[Record]) -> dict[str, float]:
    """Return the contents of the file.

    A round includes the one batch that the measured launches train; what other architectures take,
    `p2pfl simulate --virtual` measures. A message that is sent is received too, so that the fit yields the sum of
    both costs: each side gets half of it. What a MB of body costs is in part training of a larger model. What keys
    and connections between hosts add to a peer has no key.
    """

    def constant(quantity: str, term: str) -> float:
        return model.fits[quantity].constants.get(term, 0.0)

    found = {name: constant(*source) for name, source in NAMES.items()}
    found |= {name: round(found[name]) for name in COUNTS}
    found |= {
        "round_seconds": constant("cpu", "round"),
        "waiting_cpu": constant("cpu", "second"),
        "send_seconds": constant("cpu", "message") / 2,
        "receive_seconds": constant("cpu", "message") / 2,
        "write_seconds_per_byte": constant("cpu", "MB of the body") / 1e6,
        "send_seconds_per_byte": constant("cpu", "MB to another host") / 2e6,
        "receive_seconds_per_byte": constant("cpu", "MB to another host") / 2e6,
        "local_seconds_per_byte": constant("cpu", "MB to the same host") / 1e6,
        "model_copies": constant("private", "MB of the body") / 1e6,
        "peer_files": round(median(record["peer"]["files"] for record in records if record["use"] == "fit")),
        "peer_start_seconds": constant("start", "peer") + constant("warm", "peer"),
    }
    return found


def text(values: Mapping[str, float], head: str) -> str:
    """Return the file with a comment at its head."""
    lines = [
        f"{name}: {value:.4g}" if value < 1e5 else f"{name}: {value:.4e}" for name, value in sorted(values.items())
    ]
    lines.append(f"training_seconds: {{{SMALL}: 0.0}}  # in round_seconds")
    return "\n".join([*(f"# {line}" for line in head.splitlines()), *lines]) + "\n"
