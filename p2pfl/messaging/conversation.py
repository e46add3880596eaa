"""What a method exchanges with its neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from p2pfl.messaging.directions import Begin
from p2pfl.messaging.pipeline import Pipeline
from p2pfl.messaging.schema import Body, Layout, MessageSchema


@dataclass(frozen=True)
class Conversation:
    """What a method sends and receives.

    Attributes:
        layouts: what neighbors may send.
        prunes: the method drops sources (``Net.receive_only_from``).
        on_receive: replaces each body that arrives; called on the thread that decodes.
    """

    layouts: Sequence[Layout] = ()
    prunes: bool = False
    on_receive: Callable[[Body], Body] = lambda body: body

    @property
    def once(self) -> frozenset[str]:
        """The kinds whose bodies count once."""
        return self.counting("arrived", "current", "all")

    def counting(self, *how: str) -> frozenset[str]:
        """Return the kinds of one of these ``Body.counts``."""
        return frozenset(layout.body.kind() for layout in self.layouts if layout.body.counts in how)

    def schema(self, peers: int, pipeline: Pipeline | None) -> MessageSchema:
        """Return what is accepted on the wire in a mesh of so many peers."""
        layouts: Iterable[Layout] = self.layouts
        if pipeline is not None:
            layouts = [accepted for layout in layouts for accepted in pipeline.layouts(layout)]
        begin = Layout.of(Begin(()), free={"sources": {0: peers}}, ranges={"sources": range(peers)})
        return MessageSchema((*layouts, begin))
