"""MAPL's prototypes: the message, and how a peer combines the prototypes of several peers. See mapl.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.messaging.schema import Body


@dataclass(frozen=True)
class Prototypes(Body):
    """ξ, float32 [K, d_p], and the classes that the sender has samples of."""

    values: Tensor
    classes: tuple[int, ...]


def aggregate(own: Prototypes, received: Mapping[PeerId, Prototypes], w: Tensor, aggregation: Aggregator) -> Tensor:
    """Algorithm 3, line 8: ξ_i ← w_ii ξ_i + Σ_{j∈N_i} w_ij ξ_j, with w [M] renormalized over the received ones.

    Rows of classes without samples at any peer with a positive weight stay as in ``own``. Rules in place of the
    mean combine each row over the peers with samples of its class.
    """
    me = aggregation.me
    neighbors = [j for j in sorted(received) if w[j] > 0]
    total = float(w[me] + sum(w[j] for j in neighbors))
    if total == 0.0:  # all neighbors with a positive weight are missing
        return own.values
    bodies = {j: own if j == me else received[j] for j in sorted([*neighbors, me])}
    rows = ((k, j, body.values[k], float(w[j])) for j, body in bodies.items() for k in body.classes)
    if not aggregation.is_mean:
        return aggregation.combine_rows(Prototypes, rows, own.values.clone())
    aggregation.measure_rows(Prototypes, rows)
    averaged = torch.zeros_like(own.values)
    seen = torch.zeros(len(averaged), dtype=torch.bool, device=averaged.device)
    for j, body in bodies.items():
        averaged += float(w[j]) / total * body.values.to(averaged.device)
        if w[j] > 0:
            seen[list(body.classes)] = True
    return torch.where(seen[:, None], averaged, own.values)
