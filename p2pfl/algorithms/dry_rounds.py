"""``Algorithm.dry_round`` of the methods with the longest files: what a round sends and receives, no computing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pfl.algorithms.base import Work
from p2pfl.algorithms.dfml_messages import NOT_TAUGHT, Pupil, Taught
from p2pfl.messaging.net import Net

if TYPE_CHECKING:
    from p2pfl.algorithms.dfml import DFML
    from p2pfl.algorithms.mapl import MAPL


async def mapl(self: MAPL, t: int, net: Net, work: Work) -> None:
    """Nothing is pruned."""
    h = self.hyper
    await work.train(epochs=h.local_epochs, batch=h.batch)
    if h.cgl and t >= h.warmup:
        await net.exchange(self.local_head())
    await net.exchange(self.local_prototypes())
    if h.message_budget:
        await self.check_message_budget(t, net, h.message_budget)


async def dfml(self: DFML, t: int, net: Net, work: Work) -> None:
    h, assignment = self.hyper, self.schedule.assignment(t, net)
    if self.me not in assignment.participants:
        return
    await work.train(epochs=h.local_epochs, batch=h.batch)
    if self.me == assignment.aggregator:
        deadline_factor = self.schedule.models_deadlines(net)
        pupils = await net.gather(Pupil, of=assignment.senders, deadline_factor=deadline_factor)
        if pupils:
            await work.train(epochs=h.mutual_epochs, batch=h.batch, models=len(pupils) + 1)
        replies = {n: Taught(pupil.parameters, pupil.buffers) for n, pupil in pupils.items()}
        await net.scatter({n: replies.get(n, NOT_TAUGHT) for n in assignment.senders})
    else:
        await net.send(assignment.aggregator, Pupil.of(self.model))
        await net.gather(Taught, of=[assignment.aggregator], deadline_factor=self.schedule.reply_deadlines(net))
