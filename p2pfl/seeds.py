"""Seeds of the random streams in rng.py, without torch: what only reads a run folder draws from them too."""

from __future__ import annotations

import zlib

import numpy as np

SHARED, PEER = 0, 1


def sequence(seed: int, *key: int | str) -> np.random.SeedSequence:
    """Return where the stream ``key`` of a run starts; SHARED or PEER is the first part of the key."""
    spawn_key = tuple(zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key)
    return np.random.SeedSequence(seed, spawn_key=spawn_key)


def shared(seed: int, name: str, t: int = 0) -> np.random.Generator:
    """Return a generator that draws the same on every peer; each round ``t`` has its own."""
    return np.random.default_rng(sequence(seed, SHARED, name, t))
