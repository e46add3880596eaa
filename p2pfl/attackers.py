"""Who attacks in a run, by the key ``adversaries`` of its run file. All other peers are the run's honest peers.

A peer counts as an attacker in all rounds, also before the first one of its attack. What is computed over the peers
of a run, such as a mean accuracy, is over its honest peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from p2pfl import PeerId
from p2pfl.errors import RunFolderError


def drawn(
    peers: Iterable[PeerId] | Mapping[Literal["fraction"], float], number: int, count: int, seed: int
) -> frozenset[PeerId]:
    """Return the peers of an entry of ``adversaries``.

    Args:
        peers: the key ``peers`` of the entry: ids, or ``{fraction: 0.2}``.
        number: of the entry, from 0.
        count: number of peers of the run.
    """
    if not isinstance(peers, Mapping):
        return frozenset(peers)
    from p2pfl import seeds  # NumPy takes a while, and most run files list ids, or no attackers

    attackers = max(1, math.floor(peers["fraction"] * count + 1e-9))  # 0.29 * 100 is 28.999…
    order = seeds.shared(seed, "adversaries", number).permutation(count)
    return frozenset(map(int, order[:attackers]))


def attacks(settings: Mapping[str, Any]) -> dict[PeerId, str]:
    """Return the attackers of a run, ascending, with the names of their attacks: ``sign-flip``, ``noise, scaled``.

    Args:
        settings: the run file as plain values.

    Raises:
        RunFolderError: they are damaged.
    """
    found: dict[PeerId, list[str]] = {}
    try:
        for number, entry in enumerate(settings.get("adversaries") or ()):
            for peer in drawn(entry["peers"], number, settings["peers"], settings["seed"]):
                found.setdefault(int(peer), []).append(str(entry["name"]))
    except (TypeError, KeyError, ValueError) as error:
        raise RunFolderError(f"run.yaml: adversaries: damaged: {type(error).__name__}: {error}") from None
    return {peer: ", ".join(names) for peer, names in sorted(found.items())}
