"""What peers exchange before models, if their rule of aggregation screens these (p2pfl/messaging/screening.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from p2pfl.aggregation.screening import RuleScreen
from p2pfl.algorithms.base import Algorithm
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.net import Net
from p2pfl.messaging.schema import Layout
from p2pfl.messaging.screening import ModelSketch, ScreeningNet, WantedModels

SCREENING = frozenset({ModelSketch.kind(), WantedModels.kind()})
"""Kinds of messages that no method sends itself."""


def screening_layouts(algorithm: Algorithm[Any]) -> Sequence[Layout]:
    """Return what is accepted besides the method's own messages."""
    rule, peers = algorithm.aggregation.rule.screening, algorithm.peers
    if rule is None:
        return ()
    wanted = Layout.of(WantedModels(()), free={"peers": {0: peers}}, ranges={"peers": range(peers)})
    return Layout.of(ModelSketch(torch.zeros(rule.size))), wanted


def net_of(algorithm: Algorithm[Any], endpoint: Endpoint, t: int, seed: int) -> Net:
    """Return what an algorithm sends and receives with in a round."""
    rule, kind = algorithm.aggregation.rule.screening, algorithm.screened
    if rule is None or kind is None:
        return Net(endpoint, t, seed)
    return ScreeningNet(endpoint, t, seed, RuleScreen(rule, algorithm.aggregation, kind, seed))
