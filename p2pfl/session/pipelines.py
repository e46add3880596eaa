"""What the run file says about messages between a method and the wire: adversaries, then codecs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from p2pfl import PeerId, rng
from p2pfl.adversaries.attacking import Attacking
from p2pfl.adversaries.base import Attacker
from p2pfl.codecs import Codec
from p2pfl.codecs.packing import Packing, parts_of
from p2pfl.errors import P2pflError, PluginError
from p2pfl.messaging.pipeline import Chain, Pipeline
from p2pfl.messaging.schema import Layout, TensorSpec
from p2pfl.options import unknown
from p2pfl.plugins.loading import naming_lines
from p2pfl.rng import Streams
from p2pfl.run_file.run import Run
from p2pfl.run_file.schema import ALL


def make_pipeline(run: Run, me: PeerId, layouts: Sequence[Layout], streams: Streams) -> Pipeline | None:
    """Return what becomes of peer ``me``'s messages; None if nothing does.

    Args:
        layouts: what the peer's method accepts.

    Raises:
        RunFileError: a kind of message is named that the method does not have.
        PluginError: a codec does not pack what it should.
    """
    parts: list[Pipeline] = []
    kinds = sorted({layout.body.kind() for layout in layouts})
    adversaries = frozenset[PeerId]().union(*map(run.attackers, range(len(run.attacks))))
    for number, (entry, attack) in enumerate(zip(run.file.adversaries, run.attacks, strict=True)):
        _check_kinds(run, f"adversaries.{number}.messages", entry.messages, kinds)
        if me in run.attackers(number):
            attacker = Attacker(me, run.peers, adversaries)
            parts.append(Attacking(attack, attacker, streams, entry.first, entry.messages))
    _check_kinds(run, "codec", run.codecs.keys() - {ALL}, kinds)
    codec_of = partial(_codec_of, run)
    if any(codec_of(kind) is not None for kind in kinds):
        with rng.torch_seeded(run.seed, "check"), torch.no_grad(), naming_lines():
            for layout in layouts:
                if (codec := codec_of(layout.body.kind())) is not None:
                    _try_out(codec, layout.tensors.values())
        parts.append(Packing(codec_of, streams))
    return Chain(parts) if parts else None


def _codec_of(run: Run, kind: str) -> Codec | None:
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
