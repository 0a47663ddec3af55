"""Replicas that differ are told by rank and name, alike on every rank."""

import math
import re
import struct

import pytest
import torch
from communicators import SLOT_BYTES, CollectiveError, SimulatedWorld
from hypothesis import given
from hypothesis import strategies as st
from replicas import hash_bits, refuse_unlike
from replicas.unlike import CHUNK_BYTES
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.quick

HASH, UNKNOWN = "[0-9a-f]{16}", "without a majority nobody knows which is right"
MASK = (1 << 64) - 1
FACTORS = (-0x61C8864680B583EB & MASK, -0x3D4D51C2D82B14B1 & MASK, 0x165667B19E3779F9)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def reference(tensor):
    """The same hash by plain integers."""

    def shifted(word, bits):  # with the sign
        return ((word - (1 << 64) if word >> 63 else word) >> bits) & MASK

    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    total = len(data)
    for begin in range(0, max(len(data), 1), CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        chunk += bytes(-len(chunk) % 8)
        found = 0
        for place, (word,) in enumerate(struct.iter_unpack("<Q", chunk)):
            word = (word + place * FACTORS[0]) & MASK
            for factor in FACTORS[1:]:
                word = (word ^ shifted(word, 32)) * factor & MASK
            found += word ^ shifted(word, 29)
        total = (total * FACTORS[1] + found) & MASK
    return total


@given(st.binary(max_size=70), st.integers(0, 3))
def test_the_hash_of_bytes_is_the_reference(data, skipped):
    tensor = torch.frombuffer(bytearray(bytes(skipped) + data), dtype=torch.uint8)[skipped:] if data else torch.empty(0)
    assert int(hash_bits(tensor)) & MASK == reference(tensor)


@pytest.mark.parametrize("numel", [0, 1, 3, 8, 1001, CHUNK_BYTES // 4 + 3])
def test_the_hash_is_the_reference_across_chunks(numel):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert int(hash_bits(tensor)) & MASK == reference(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (3, 0), (17,)])
def test_every_dtype_and_layout(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    assert torch.equal(hash_bits(tensor), hash_bits(tensor.clone()))
    if len(shape) == 2:
        assert torch.equal(hash_bits(tensor.T.contiguous().T), hash_bits(tensor))
    for element in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[element] += 1
        assert not torch.equal(hash_bits(tensor), hash_bits(other))


def test_what_plain_sums_miss():
    x = torch.randn(1000)
    nan, payload = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    hashes = [x, -x, x.flip(0), x.roll(1), torch.cat([x[1:2], x[:1], x[2:]]), torch.cat([x, torch.zeros(1)])]
    hashes += [torch.zeros(4), -torch.zeros(4), torch.zeros(5), nan, payload, x[:0]]
    assert len({int(hash_bits(one)) for one in hashes}) == len(hashes)
    flipped = x.clone()
    flipped[[1, 501]] *= -1  # two sign bits, both the highest of their words
    assert int(hash_bits(flipped)) != int(hash_bits(x))
    assert int(hash_bits(nan)) == int(hash_bits(nan.clone()))


class Storages(TorchFunctionMode):
    """Address and bytes of what each result lies in."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found.append((result.untyped_storage().data_ptr(), result.untyped_storage().nbytes()))
        return result


@pytest.mark.parametrize("numel", [1, 60, 64, 1000])
def test_hashing_needs_memory_for_a_chunk_at_a_time(numel, monkeypatch):
    monkeypatch.setattr("replicas.unlike.CHUNK_BYTES", 64)
    tensor = torch.zeros(numel, dtype=torch.uint8)
    with Storages() as storages:
        hash_bits(tensor)
    made = [nbytes for address, nbytes in storages.found if address != tensor.data_ptr()]
    assert max(made) == min(64, -(-numel // 8) * 8)


def replicas(numels=(15, 1, 7)):
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": torch.randn(n, generator=generator) for i, n in enumerate(numels)}


def told(size, changes, numels=(15, 1, 7)):
    """What each rank raises, None if nothing; changes: (rank, name) -> value of the first element."""

    def body(comm):
        named = replicas(numels)
        for (rank, name), value in changes.items():
            if rank == comm.rank:
                named[name][0] = value
        try:
            refuse_unlike(named, comm)
        except CollectiveError as error:
            return str(error)

    return SimulatedWorld(size).run(body)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numels", [(15, 1, 7), (), (0, 3), (1025,)])
def test_alike(size, numels):
    assert told(size, {}, numels) == [None] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_nans_alike_are_alike(size):
    assert told(size, {(rank, "p1"): math.nan for rank in range(size)}) == [None] * size


@pytest.mark.parametrize(
    ("size", "changes", "says"),
    [
        (2, {(1, "p2"): 9.0}, f"hashes of 'p2' are {HASH} on rank 0, {HASH} on rank 1, and {UNKNOWN}; of 3"),
        (2, {(0, "p0"): 9.0, (0, "p2"): 9.0}, f"hashes of 'p0' and 1 more are {HASH} on rank 0, {HASH} on rank 1, and"),
        (3, {(0, "p1"): math.nan}, "rank 0 in 'p1', against most of the 3 ranks; of 3 tensors"),
        (3, {(1, "p0"): 9.0, (2, "p2"): 9.0}, "rank 1 in 'p0', rank 2 in 'p2', against most of the 3 ranks; of"),
        (
            3,
            {(1, "p0"): 8.0, (2, "p0"): 9.0},
            f"hashes of 'p0' are {HASH} on rank 0, {HASH} on rank 1, {HASH} on rank 2",
        ),
        (
            3,
            {(0, "p1"): 7.0, (1, "p0"): 8.0, (2, "p0"): 9.0},
            f"rank 0 in 'p1', against most of the 3 ranks; hashes of 'p0' are {HASH} on rank 0,",
        ),
        (4, {(1, "p0"): 8.0, (2, "p0"): 8.0}, f"hashes of 'p0' are {HASH} on rank 0, .* on rank 3, and {UNKNOWN}"),
        (
            5,
            {(0, "p2"): 9.0, (4, "p1"): 9.0, (4, "p2"): 8.0},
            "rank 0 in 'p2', rank 4 in 'p1' and 1 more, against most",
        ),
        (8, {(6, "p0"): 0.0, (3, "p0"): -0.0}, "rank 3 in 'p0', rank 6 in 'p0', against most of the 8"),
    ],
)
def test_ranks_that_differ_are_named(size, changes, says):
    found = told(size, changes)
    assert len(set(found)) == 1
    assert re.match(f"replicas differ: {says}", found[0]), found[0]


def test_ranks_by_other_numbers_and_when():
    def body(comm):
        refuse_unlike({"p": torch.full((2,), float(comm.rank == 1))}, comm, when="after step 7", ranks=[1, 3, 5])

    with pytest.raises(
        CollectiveError, match="replicas differ after step 7: rank 3 in 'p', against most of the 3 ranks;"
    ):
        SimulatedWorld(3).run(body)


def test_other_names_or_shapes_are_no_comparison():
    def body(comm):
        with pytest.raises(CollectiveError, match="ranks disagree"):
            refuse_unlike({"p": torch.zeros(3 + comm.rank)}, comm)

    SimulatedWorld(2).run(body)


def test_alike_costs_eight_bytes_a_rank():
    world = SimulatedWorld(4)
    world.run(lambda comm: refuse_unlike(replicas(), comm))
    assert world.bytes_sent == [8 * 3 + 2 * SLOT_BYTES] * 4


def test_ranks_that_hold_the_same_get_its_hash():
    def body(comm, value):
        return refuse_unlike({"p": torch.full((5,), value), "q": torch.zeros(2)}, comm)

    found = [SimulatedWorld(3).run(lambda comm, value=value: body(comm, value)) for value in (1.0, 1.0, 2.0)]
    assert all(len(set(ranks)) == 1 for ranks in found)
    assert found[0] == found[1] != found[2]
    assert body(None, 1.0) == found[0][0]  # of one rank, too
