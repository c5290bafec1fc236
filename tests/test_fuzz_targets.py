"""`make fuzz` in small: every target runs its seeds, and some mutations of them, without atheris."""

from __future__ import annotations

import logging
import random

import pytest

from stress.fuzz import files
from stress.fuzz.target import Drawn, pieces
from stress.fuzz.targets import TARGETS

MUTATIONS = 60


def mutated(data: bytes, words: list[bytes], rng: random.Random) -> bytes:
    """A few bytes changed, cut out, or put in."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        put_in = rng.choice([bytes([rng.randrange(256)]), b"", *words])
        out[at : at + rng.randrange(4)] = put_in
    return bytes(out)


def test_an_error_that_is_not_declared_comes_out(monkeypatch):
    target = TARGETS["config"]

    def broken(path: object) -> None:
        raise ZeroDivisionError("nobody declared it")

    monkeypatch.setattr(files, "read_spec", broken)
    with pytest.raises(ZeroDivisionError):
        target.run(target.seeds[0])


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_mutations_of_them_raise_only_what_is_declared(name):
    logging.getLogger("headwater").setLevel(logging.CRITICAL)
    target, rng = TARGETS[name], random.Random(name)
    for seed in target.seeds:
        target.run(seed)
        target.run(b"")
    for _ in range(MUTATIONS):
        target.run(mutated(rng.choice(target.seeds), list(target.words), rng))


def test_bytes_make_choices_whatever_they_are():
    drawn = Drawn(b"\x05\x02ab")
    assert (drawn.below(4), drawn.text(9), drawn.below(100), drawn.rest) == (1, "ab", 0, b"")
    assert ["".join(p) for p in pieces(b"\x01\x04", "hello")] == ["h", "ell", "o"]
