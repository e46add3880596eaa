"""Mutated messages are rejected or survive a round trip: a small part of `make fuzz`."""

from __future__ import annotations

import random

from benchmarks.fuzz.decoder import INSTRUMENTED
from benchmarks.fuzz.messages import VALID, encode_valid, is_accepted, mutate

FRAMES = 3_000


def test_rejects_mutated_messages_or_round_trips_them() -> None:
    chance = random.Random(1)
    frames = messages = accepted = 0
    while frames < FRAMES:
        message = mutate(encode_valid(chance.choice(VALID)), chance)
        frames += len(message)
        messages += 1
        accepted += is_accepted(message)
    assert 0 < accepted < messages / 2


def test_accepts_valid_messages() -> None:
    assert all(is_accepted(encode_valid(body)) for body in VALID)


def test_the_functions_whose_coverage_guides_the_fuzzer_exist() -> None:
    assert all(callable(getattr(module, name)) for module, names in INSTRUMENTED.items() for name in names)
