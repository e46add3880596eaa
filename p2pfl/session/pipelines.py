"""What the run file says about messages between a method and the wire: adversaries, then codecs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from p2pfl import PeerId, rng
from p2pfl.adversaries.attacking import Attacking
from p2pfl.adversaries.base import Attacker, Poisoning
from p2pfl.adversaries.before import Before
from p2pfl.aggregation import Contributions
from p2pfl.aggregation.aggregator import Aggregator
from p2pfl.algorithms.base import Algorithm
from p2pfl.codecs import Codec
from p2pfl.codecs.packing import Packing, parts_of
from p2pfl.errors import P2pflError, PluginError
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.pipeline import Chain, Pipeline
from p2pfl.messaging.schema import Layout, TensorSpec
from p2pfl.options import unknown
from p2pfl.plugins.loading import naming_lines
from p2pfl.rng import Streams
from p2pfl.run_file.run import Run
from p2pfl.run_file.schema import ALL
from p2pfl.session.screening import SCREENING
from p2pfl.tensors import Tensors, equal


def make_pipeline(
    run: Run,
    place: Neighborhood,
    layouts: Sequence[Layout],
    streams: Streams,
    algorithm: Algorithm[Any] | None = None,
) -> Pipeline | None:
    """Return what becomes of a peer's messages; None if nothing does.

    Args:
        place: the peer in the graph.
        layouts: what the peer's method accepts.
        algorithm: the peer's; None if nothing is trained. Attacks may copy its models, or keep it from training.

    Raises:
        RunFileError: a kind of message is named that the method does not have, or an attack changes none.
        PluginError: a codec does not pack what it should.
    """
    every = sorted({layout.body.kind() for layout in layouts})
    kinds = [kind for kind in every if kind not in SCREENING]
    for number, entry in enumerate(run.file.adversaries):
        _check_kinds(run, f"adversaries.{number}.messages", entry.messages, every)
        _check_effect(run, number, [layout for layout in layouts if layout.body.kind() in (entry.messages or kinds)])
    parts = _attacking(run, place, layouts, kinds, streams, algorithm)
    _check_kinds(run, "codec", run.codecs.keys() - {ALL}, kinds)
    codec_of = partial(_codec_of, run)
    if any(codec_of(kind) is not None for kind in kinds):
        with rng.torch_seeded(run.seed, "check"), torch.no_grad(), naming_lines():
            for layout in layouts:
                if (codec := codec_of(layout.body.kind())) is not None:
                    _try_out(codec, layout.tensors.values())
        parts.append(Packing(codec_of, streams))
    return Chain(parts) if parts else None


def _attacking(
    run: Run,
    place: Neighborhood,
    layouts: Sequence[Layout],
    kinds: Sequence[str],
    streams: Streams,
    algorithm: Algorithm[Any] | None,
) -> list[Pipeline]:
    """Return the attacks of a peer, in the order of the run file, and ahead of them what they need.

    Args:
        kinds: the kinds of messages that an attack changes by default.
    """
    adversaries = frozenset[PeerId]().union(*map(run.attackers, range(len(run.attacks))))
    entries = enumerate(zip(run.file.adversaries, run.attacks, strict=True))
    mine = [(entry, attack) for number, (entry, attack) in entries if place.me in run.attackers(number)]
    before = None
    if algorithm is not None and mine:
        if any(attack.uses_before for _, attack in mine):
            before = Before(algorithm.module_tensors)
        idle_from = min((entry.first for entry, attack in mine if not attack.trains), default=run.rounds)
        algorithm.before_training = partial(_before_training, algorithm.aggregation, before, idle_from)

    def attacker() -> Attacker:
        return Attacker(place, adversaries, layouts, combine=partial(_combined, run))

    attacking = [
        Attacking(attack, attacker(), streams, entry.first, entry.messages or kinds, before)
        for entry, attack in mine
        if not isinstance(attack, Poisoning)
    ]
    return [*attacking] if before is None else [before, *attacking]


def _combined(run: Run, tensors: Mapping[PeerId, Tensors], me: PeerId, kind: str, t: int) -> Tensors:
    """Return what the run's rule makes of the tensors of several senders, with equal weights."""
    given = Contributions(tensors, equal(tensors), me, tensors[me], kind, t, run.rounds)
    return run.aggregation.combine(run.aggregation.transform(given))


def _before_training(clock: Aggregator, before: Before | None, idle_from: int) -> bool:
    """Keep what attacks need of the models before they are trained; return whether they are."""
    if before is not None:
        before.keep(clock.t)
    return clock.t < idle_from


def _check_effect(run: Run, number: int, chosen: Sequence[Layout]) -> None:
    """Raise RunFileError if an attack has no effect on the messages that it may change."""
    entry, attack = run.file.adversaries[number], run.attacks[number]
    if not attack.has_effect(chosen):
        kinds = ", ".join(sorted({layout.body.kind() for layout in chosen}))
        found = f"sends {kinds}, in which it changes nothing" if chosen else "sends nothing"
        text = f"{entry.name!r} has no effect: {run.algorithm.name} {found}; choose another attack"
        raise run.error_at(f"adversaries.{number}", P2pflError(text))


def _codec_of(run: Run, kind: str) -> Codec | None:
    if kind in SCREENING:
        return None
    codec = run.codecs.get(kind, run.codecs.get(ALL))
    return None if type(codec) is Codec else codec


def _check_kinds(run: Run, key: str, found: Iterable[str], known: Collection[str]) -> None:
    for kind in sorted(found):
        if kind not in known:
            reason = P2pflError(unknown(kind, known, f"message of {run.algorithm.name}:"))
            raise run.error_at(key, reason)


def _try_out(codec: Codec, specs: Iterable[TensorSpec]) -> None:
    """Pack the smallest of some tensors, and unpack it."""
    packed = [spec for spec in specs if parts_of(codec, spec) is not None]
    if not packed:
        return
    spec = min(packed, key=lambda spec: spec.bytes)
    parts = codec.pack(torch.randn(spec.shape).to(spec.dtype))
    expected = parts_of(codec, spec) or {}
    found = {name: TensorSpec(part.dtype, tuple(part.shape)) for name, part in parts.items()}
    if expected.keys() != found.keys() or not all(expected[name].admits(found[name]) for name in expected):
        raise PluginError.of(type(codec).pack, f"pack returned {_shown(found)}; `parts` promises {_shown(expected)}")
    unpacked = codec.unpack(parts, spec)
    if not spec.admits(got := TensorSpec(unpacked.dtype, tuple(unpacked.shape))):
        raise PluginError.of(type(codec).unpack, f"unpack returned {got} instead of {spec}")


def _shown(specs: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in sorted(specs.items())) or "nothing"
