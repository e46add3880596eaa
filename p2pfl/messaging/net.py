"""Net: an algorithm's view of one round. Its verbs are named as in MPI."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np

from p2pfl import PeerId, rng
from p2pfl.errors import NetError, NotANeighbor
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.newest import NEXT
from p2pfl.messaging.schema import B, Body, copied, take_apart, tensors_of, with_tensors
from p2pfl.messaging.wire import Message
from p2pfl.tensors import Tensors, clone, digest, widened

T = TypeVar("T")

MEMOIZED = 4
"""Results that a simulation keeps at a time."""


class Participants(tuple[PeerId, ...]):
    """Ascending peer ids. Looking for one takes the same time among any number."""

    @cached_property
    def _ids(self) -> frozenset[PeerId]:
        return frozenset(self)

    def __contains__(self, peer: object) -> bool:
        return peer in self._ids


@lru_cache(maxsize=16)  # simulated peers ask for the same ones
def _participants(
    seed: int, t: int, peers: int, joins: tuple[tuple[PeerId, int], ...], fraction: float
) -> Participants:
    absent = {peer for peer, joins_at in joins if joins_at > t}
    joined = [peer for peer in range(peers) if peer not in absent]
    if fraction >= 1.0:
        return Participants(joined)
    draw = rng.shared(seed, "net.participants", t)
    count = math.floor(fraction * len(joined) + 1e-9)  # 0.29 * 100 is 28.999…
    chosen = draw.permutation(joined)[: max(1, count)]
    return Participants(sorted(int(peer) for peer in chosen))


class Messenger(Protocol):
    """What a Net needs of a peer's endpoint; described there."""

    neighborhood: Neighborhood
    prunes: bool
    memo: dict[str, Tensors] | None
    taken_ages: dict[str, dict[PeerId, int]]

    @property
    def waits_for_rounds(self) -> bool: ...

    @property
    def staleness(self) -> float: ...

    @property
    def all_sources(self) -> set[PeerId]: ...

    @property
    def sources(self) -> set[PeerId]: ...

    @property
    def expected_receivers(self) -> set[PeerId]: ...

    async def receivers(self) -> set[PeerId]: ...

    async def see_first(self, kind: str, senders: Collection[PeerId], deadline_factor: float = 1.0) -> None: ...

    async def send(
        self, to: Iterable[PeerId], body: B, count: int | None = None, *, stored: bool = False, checked: bool = False
    ) -> B | None: ...

    async def take(
        self, kind: str, senders: Sequence[PeerId], t: int, deadline_factor: float = 1.0, *, addressed: bool = False
    ) -> dict[PeerId, Message]: ...

    async def collect(
        self, kind: str, senders: Collection[PeerId], t: int, awaited: Collection[PeerId], *, replies: bool = False
    ) -> dict[PeerId, list[Message]]: ...

    def count_as_missing(self, kind: str, senders: Iterable[PeerId]) -> None: ...

    def receive_only_from(self, senders: Iterable[PeerId]) -> None: ...


class Net:
    """What an algorithm can send and receive in round ``t``.

    Args:
        endpoint: sends and receives.
        t: the round.
        seed: the run's, for ``shared``.
    """

    def __init__(self, endpoint: Messenger, t: int, seed: int) -> None:
        self._endpoint = endpoint
        self._place = endpoint.neighborhood
        self.t = t
        self.seed = seed

    # ---- the graph

    @property
    def me(self) -> PeerId:
        return self._place.me

    @property
    def peers(self) -> int:
        """Number of peers in the mesh, late joiners included."""
        return self._place.peers

    @property
    def neighbors(self) -> tuple[PeerId, ...]:
        """Neighbors in this round's graph that have joined, ascending, whether or not messages flow between us."""
        return self._place.topology_at(self.t).neighbors[self.me]

    def neighbors_of(self, peer: PeerId, t: int) -> tuple[PeerId, ...]:
        """Return another peer's neighbors in round ``t``, ascending; the run file determines them."""
        return self._place.topology_at(t).neighbors[peer]

    def receivers_of(self, peer: PeerId, t: int) -> tuple[PeerId, ...]:
        """Return the neighbors that another peer may send to in round ``t``, ascending."""
        return self._place.topology_at(t).receivers[peer]

    @property
    def sources(self) -> tuple[PeerId, ...]:
        """Neighbors that send to this peer in this round, ascending."""
        return tuple(sorted(self._endpoint.sources))

    @property
    def receivers(self) -> tuple[PeerId, ...]:
        """Neighbors that receive from this peer in this round, ascending; certain once something was sent in it."""
        return tuple(sorted(self._endpoint.expected_receivers))

    @property
    def sides(self) -> tuple[int, ...]:
        """The side of each peer in the graph, which must be bipartite over all rounds: see ``Topology.sides``."""
        return self._place.topology.sides

    @property
    def degrees(self) -> dict[PeerId, int]:
        """Number of neighbors of this peer and of each of its neighbors, ascending."""
        topology = self._place.topology_at(self.t)
        return {peer: topology.degree(peer) for peer in sorted((self.me, *self.neighbors))}

    @property
    def mixing_weights(self) -> dict[PeerId, float]:
        """W_ij of each neighbor j that may send to this peer i in this round, ascending; W_ii is what remains to 1.

        Metropolis weights, unless the run file's graph is time-varying and defines its weights itself.
        """
        return self._place.topology_at(self.t).row(self.me)

    def joined_by(self, t: int) -> list[PeerId]:
        """Return the peers that have joined by round ``t``, ascending."""
        joins = self._place.joins
        return [peer for peer in range(self.peers) if joins.get(peer, 0) <= t]

    def rounds_since_join(self, peer: PeerId) -> int:
        """Return how many rounds have passed since a peer joined; ``t`` if it has been there from the start."""
        return self.t - self._place.joins.get(peer, 0)

    # ---- shared randomness

    @cached_property
    def shared(self) -> np.random.Generator:
        """A generator that draws the same on every peer, new each round: assigns roles without a coordinator."""
        return rng.shared(self.seed, "net.shared", self.t)

    def participants(self, fraction: float) -> tuple[PeerId, ...]:
        """Draw the peers that take part in this round; every peer draws the same ones.

        Partial participation without a server: participants train and send, and everybody receives. On a complete
        graph this equals a server that samples clients.

        Args:
            fraction: of the peers that have joined, rounded down; at least one takes part.

        Returns:
            Ascending peer ids.
        """
        joins = tuple(sorted(self._place.joins.items()))
        return _participants(self.seed, self.t, self.peers, joins, fraction)

    def drawn(self, t: int, key: tuple[Hashable, ...], draw: Callable[[], T]) -> T:
        """Return ``draw()``, which depends on nothing but ``key`` and the graph of round ``t``.

        Simulated peers draw once.
        """
        return self._place.topology_at(t).memoized((*key, t), draw)

    def memoized(self, name: str, inputs: Mapping[str, Any], compute: Callable[[], Tensors]) -> Tensors:
        """Return ``compute()``, a server's work that each peer does over what it has received.

        Simulated peers with equal ``inputs`` do it once in a round, and all get the same tensors: do not change them.
        ``compute`` depends on nothing but ``inputs``, the run file, the round and ``shared``, from which nothing else
        draws in the round.

        Args:
            name: of the computation.
            inputs: nested mappings and sequences of tensors and plain values.
        """
        memo = self._endpoint.memo
        if memo is None:
            return compute()
        key = f"{name} {self.t} {digest(inputs)}"
        if key not in memo:
            result = clone(compute())
            while len(memo) >= MEMOIZED:
                del memo[next(iter(memo))]
            memo[key] = result
        return memo[key]

    # ---- messages

    async def send(self, to: PeerId, body: Body) -> None:
        """Send ``body`` to one receiver. Raises NotANeighbor if ``to`` is not a receiver."""
        await self.scatter({to: body})

    async def reply(self, to: PeerId, body: Body) -> None:
        """Send ``body`` to a peer whose message this round has collected.

        Where rounds do not wait for one another, the message may be of another round, in whose graph the two are
        neighbors: not necessarily in this one's.
        """
        if to not in self._place.neighbors:
            raise NotANeighbor(f"peer {self.me} cannot reply to peer {to}: not a neighbor in any round")
        await self._endpoint.send([to], body)

    async def broadcast(self, body: Body, to: Iterable[PeerId] | None = None) -> None:
        """Send ``body`` to every receiver, or to some of them.

        Raises:
            NotANeighbor: one of ``to`` is not a receiver. Nothing is sent.
            Unexpected: without ``to``: this peer accepts bodies of this kind, but not this one. Nothing is sent.
        """
        receivers = await self._receivers_among(to)
        await self._endpoint.send(receivers, body, checked=to is None)

    async def publish(self, body: B) -> B:
        """Send ``body`` to every receiver, and return a copy that takes no memory: its tensors are in the journal.

        They may be modified; that modifies neither ``body`` nor the journal. All peers publish at the same point of
        the round, before they gather what the others publish.

        Raises Unexpected, and sends nothing, if this peer accepts bodies of this kind, but not this one.
        """
        await self._endpoint.see_first(body.kind(), self.sources)
        stored = await self._endpoint.send(sorted(await self._endpoint.receivers()), body, stored=True, checked=True)
        return copied(body) if stored is None else stored

    async def scatter(self, bodies: Mapping[PeerId, Body]) -> None:
        """Send each of some receivers its body. One that several receivers get is encoded and stored once.

        Raises NotANeighbor, and sends nothing, if one of them is not a receiver.
        """
        groups: dict[int, tuple[Body, list[PeerId]]] = {}  # by id; the body keeps the id from being reused
        for to in await self._receivers_among(bodies):
            body = bodies[to]
            groups.setdefault(id(body), (body, []))[1].append(to)
        for body, receivers in groups.values():
            await self._endpoint.send(receivers, body)

    async def _receivers_among(self, peers: Iterable[PeerId] | None) -> list[PeerId]:
        """Return ``peers``, or all receivers, ascending. Raises NotANeighbor if one of them is not a receiver."""
        receivers = await self._endpoint.receivers()
        chosen = sorted(receivers if peers is None else set(peers))
        for to in chosen:
            if to not in receivers:
                neighbor = to in self._place.topology_at(self.t).receivers[self.me]
                reason = "it stopped receiving" if neighbor else "not a neighbor"
                raise NotANeighbor(f"peer {self.me} cannot send to peer {to} in round {self.t}: {reason}")
        return chosen

    async def gather(
        self, kind: type[B], of: Iterable[PeerId] | None = None, deadline_factor: float = 1.0
    ) -> dict[PeerId, B]:
        """Receive one body of ``kind`` from each source.

        Args:
            kind: class of the bodies.
            of: the sources to receive from; default all. Raises NotANeighbor for others.
            deadline_factor: factor of the deadline, for sources that compute longer or wait for others first.

        Returns:
            {source: body}, ascending. Sources that miss the deadline, or whose body holds NaN, infinity or diverged
            values, are omitted; the runtime logs and counts them.
        """
        senders = self.sources if of is None else tuple(of)
        sources = self._endpoint.sources
        for sender in senders:
            if sender not in sources:
                raise NotANeighbor(f"peer {self.me} does not receive from peer {sender} in round {self.t}")
        messages = await self._endpoint.take(kind.kind(), senders, self.t, deadline_factor)
        return {sender: cast(B, message.body) for sender, message in messages.items()}

    async def exchange(
        self, body: B, among: Iterable[PeerId] | None = None, deadline_factor: float = 1.0
    ) -> dict[PeerId, B]:
        """Broadcast ``body``, and gather the same kind from all sources.

        Args:
            body: what to send.
            among: the only peers that send, this one included or not; default all. Everybody receives.
            deadline_factor: as in ``gather``.

        Returns:
            {source: body}, as ``gather`` does.
        """
        senders = among if among is None or isinstance(among, Participants) else set(among)
        of = [j for j in self.sources if senders is None or j in senders]
        if len(of) < len(self.sources) and not self._endpoint.waits_for_rounds:
            raise NetError("exchange: with a synchrony other than rounds, every peer must send in every round")
        if senders is None or self.me in senders:
            await self._endpoint.see_first(body.kind(), of, deadline_factor)
            await self.broadcast(body)
        return await self.gather(type(body), of, deadline_factor)

    async def collect(
        self, kind: type[B], senders: Callable[[int], Iterable[PeerId]] | None = None, *, replies: bool = False
    ) -> dict[PeerId, list[B]]:
        """Receive the bodies of ``kind`` that have arrived and that no round has taken yet.

        In a round, a peer sends each receiver at most one body of a kind that counts once (``Body.counts``), and
        calls ``collect`` once for that kind. It returns the bodies that were sent in the same round, unless the run
        file has another ``synchrony``: with a staleness s, round t waits for those of round t − s; with ``none``, for
        none.

        Args:
            senders: returns who sends this peer one in a given round; default: the sources in that round's graph.
            replies: wait, whatever the ``synchrony``, until each of this round's ``senders`` has sent another one, in
                whatever round it was, or can send none any more: it has finished.

        Returns:
            {source: bodies}, both ascending. Bodies that hold NaN, infinity or diverged values are omitted.
        """
        endpoint, first = self._endpoint, self.t - self._endpoint.staleness
        senders = self._sources_at if senders is None else senders
        if replies and not endpoint.waits_for_rounds:
            t, awaited = NEXT, set(senders(self.t))
        else:
            t, awaited = (NEXT, set()) if first < 0 else (int(first), set(senders(int(first))))
        awaited &= endpoint.all_sources
        of = awaited if endpoint.waits_for_rounds else endpoint.all_sources
        found = await endpoint.collect(kind.kind(), of, t, awaited, replies=replies)
        return {sender: [cast(B, message.body) for message in messages] for sender, messages in found.items()}

    def _sources_at(self, t: int) -> Iterable[PeerId]:
        return self._place.topology_at(t).sources[self.me]

    def ages(self, kind: type[Body]) -> dict[PeerId, int]:
        """Return for each source how many rounds ago the body was sent that this round took; negative if it is ahead.

        All are 0, unless the run file has another ``synchrony`` than rounds.
        """
        return dict(self._endpoint.taken_ages.get(kind.kind(), {}))

    def count_as_missing(self, kind: type[Body], sender: PeerId) -> None:
        """Record that a body of ``kind`` arrived that its receiver cannot use."""
        self._endpoint.count_as_missing(kind.kind(), [sender])

    def receive_only_from(self, senders: Iterable[PeerId]) -> None:
        """Stop receiving from all other sources permanently, from the next round on.

        Raises NetError if the method does not declare ``prunes``.
        """
        if not self._endpoint.prunes:
            raise NetError("receive_only_from: the method must declare `prunes = True`")
        self._endpoint.receive_only_from(senders)

    async def allreduce(self, body: B, op: Literal["mean", "sum"] = "mean") -> B:
        """Return the mean or sum over all peers of the connected component, bit-identical on every peer of it.

        Partial sums go up a breadth-first spanning tree of the graph to its lowest id (children in ascending order),
        and the total comes back down: 2 messages per tree edge. Every peer must call it in the same round. A missing
        peer takes its subtree out of the result. Sums of types narrower than float32 travel in float32, and the
        result is rounded once.

        Args:
            body: tensors only; each is reduced on its own.
            op: ``mean`` or ``sum``.
        """
        endpoint = self._endpoint
        if not endpoint.waits_for_rounds:
            raise NetError("allreduce: all peers must compute the same round; leave out synchrony in the run file")
        topology = self._place.topology_at(self.t)
        if topology.directed:
            raise NetError("allreduce: edges of this round's graph have one direction only; use an undirected graph")
        tree = topology.spanning_tree
        parent, children = tree.parent[self.me], tree.children[self.me]
        own, plain = take_apart(body)
        if plain:
            raise NetError(f"allreduce: {body.kind()} must hold tensors only")
        # Children wait for their children: one deadline per level, so that a missing leaf costs its contribution
        # only, and not the contributions of all peers that waited for it.
        deadline_factor = float(tree.height[self.me])
        total = {path: widened(tensor.detach().clone()) for path, tensor in own.items()}
        count = 1
        partial = await endpoint.take(body.kind(), children, self.t, deadline_factor, addressed=True)
        for child, message in partial.items():
            if message.plan.count > tree.size[child]:  # no subtree sums up more peers than it has
                self.count_as_missing(type(body), child)
                continue
            for path, tensor in tensors_of(message.body).items():
                total[path] += tensor.to(total[path])
            count += message.plan.count
        if count == 1:
            total = {path: tensor.to(own[path].dtype) for path, tensor in total.items()}
        result = with_tensors(body, total)
        if parent is not None:
            await endpoint.send([parent], result, count)
            deadline_factor = tree.height[tree.root[self.me]] + 1.0
            answer = await endpoint.take(body.kind(), [parent], self.t, deadline_factor, addressed=True)
            if parent in answer and count <= answer[parent].plan.count <= tree.size[tree.root[self.me]]:
                result, count = cast(B, answer[parent].body), answer[parent].plan.count
        await endpoint.send(children, result, count)
        if op == "mean":
            result = with_tensors(result, {path: widened(x) / count for path, x in tensors_of(result).items()})
        narrow = {path: tensor.dtype for path, tensor in own.items() if widened(tensor) is not tensor}
        reduced = {path: x.to(narrow.get(path, x.dtype)) for path, x in tensors_of(result).items()}
        return with_tensors(result, reduced)
