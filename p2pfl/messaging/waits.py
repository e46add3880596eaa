"""Waits: a peer's waits for messages, and the time that they take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from p2pfl import PeerId
from p2pfl.messaging.clock import Clock
from p2pfl.messaging.deadline import WaitPolicy
from p2pfl.messaging.mailbox import Mailbox


class Waits:
    """Waits for what arrives in a mailbox.

    Args:
        mailbox: of the peer.
        policy: how long one wait may last.
        idle: entered around every wait, as in ``Endpoint``.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        policy: WaitPolicy,
        idle: Callable[[Callable[[], list[PeerId]]], AbstractAsyncContextManager[None]],
    ) -> None:
        self.policy = policy
        self.clock = Clock()
        """What the peer has computed is over before it waits."""
        self._mailbox = mailbox
        self._idle = idle
        self._waiting = 0  # waits in progress, in several tasks of the method
        self._began = self._wasted = 0.0
        self.reset()

    def reset(self) -> None:
        """Begin to count the seconds of another round."""
        self.seconds = 0.0
        self.wasted = 0.0
        """Seconds that waits lasted beyond the last arrival."""

    async def wait(
        self, kind: str, senders: Iterable[PeerId], t: int, deadline_factor: float = 1.0, *, addressed: bool = False
    ) -> None:
        """Return when a message of each sender has arrived, or will not. Releases the compute slot meanwhile."""
        await self.clock.settle()
        keys = {sender: (t, kind, sender) for sender in senders}
        if all(key in self._mailbox for key in keys.values()):
            if self._mailbox.keeps:  # what has arrived is to count, and other peers of this host are to compute too
                async with self._idle(list):
                    await asyncio.sleep(0)
            return

        def still_missing() -> list[PeerId]:
            return [sender for sender, key in keys.items() if key not in self._mailbox]

        async with self._idle(still_missing):
            clock = asyncio.get_running_loop().time
            if self._waiting == 0:
                self._began, self._wasted = clock(), 0.0
            self._waiting += 1  # waits of several tasks overlap: each second counts once
            try:
                waiting = self._mailbox.wait(keys.values(), self.policy, deadline_factor, addressed=addressed)
                self._wasted = max(self._wasted, await waiting)
            finally:
                self._waiting -= 1
            if self._waiting == 0:
                self.wasted += self._wasted
                self.seconds += clock() - self._began
