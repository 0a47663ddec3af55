"""A message that was changed on its way has another checksum."""

from __future__ import annotations

import random

import pytest
from communicators.background.call import COLUMNS, checksum
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.quick

LENGTHS = st.sampled_from([0, 1, 7, 4096, 8 * COLUMNS - 1, 8 * COLUMNS, 8 * COLUMNS + 1, 24 * COLUMNS + 13])


@given(length=LENGTHS, flips=st.integers(1, 40), seed=st.integers(0, 1 << 30), zeros=st.booleans())
def test_flipped_bits_are_seen(length, flips, seed, zeros):
    draw = random.Random(seed)
    sent = bytearray(length) if zeros else bytearray(draw.randbytes(length))
    came = bytearray(sent)
    for _ in range(flips if length else 0):
        bit = draw.randrange(8 * length)
        came[bit // 8] ^= 1 << bit % 8
    assert (checksum(memoryview(sent)) == checksum(memoryview(came))) == (sent == came)


@given(length=LENGTHS.filter(lambda n: n > 16), seed=st.integers(0, 1 << 30))
def test_exchanged_words_are_seen(length, seed):
    """As a part of a packet that arrives at another place."""
    sent = bytearray(random.Random(seed).randbytes(length))
    came = sent[8:16] + sent[:8] + sent[16:]
    assert checksum(memoryview(sent)) != checksum(memoryview(came))


def test_bytes_that_begin_anywhere():
    memory = memoryview(bytearray(random.Random(1).randbytes(20 * COLUMNS)))
    assert checksum(memory[3:]) == checksum(memoryview(bytes(memory[3:])))
