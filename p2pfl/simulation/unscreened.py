"""The exchange of sketches and models in virtual time, where nothing is computed: all models are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from p2pfl import PeerId
from p2pfl.aggregation.screening import RuleScreen
from p2pfl.messaging.schema import Body
from p2pfl.messaging.screening import ScreeningNet
from p2pfl.session.screening import net_of


class _WantsAll(RuleScreen):
    def sketch(self, body: Body) -> Tensor:
        return torch.zeros(self.rule.size)

    def accepted(self, own: Body | None, sketches: Mapping[PeerId, Tensor]) -> list[PeerId]:
        return list(sketches)


class _Untrained(ScreeningNet):
    def _kept(self, body: Body) -> Body:
        return body  # nothing changes it


virtual_net = partial(net_of, screening=_Untrained, screen=_WantsAll)
