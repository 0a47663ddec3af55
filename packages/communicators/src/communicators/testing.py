"""The laws of a collective, for tests: hypothesis strategies and `check_laws`.

A collective of your own is checked in five lines:

    @given(inputs=testing.inputs())
    def test_laws(inputs):
        testing.check_laws(my_allreduce, inputs)

where my_allreduce(comm, tensor) returns the sum over ranks. A sparse collective also says how to see its inputs
and results as dense tensors, and what a rank put back. Needs hypothesis.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from communicators.communicator import Communicator
from communicators.link import Link
from communicators.simulated.world import SimulatedWorld

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    needed = 'these laws need hypothesis: pip install "thinwire-communicators[testing]"'
    raise ModuleNotFoundError(needed, name=error.name) from error

X = TypeVar("X")
R = TypeVar("R")

WORLD_SIZES = (1, 2, 3, 5, 8, 4, 6, 7, 13, 16)
"""Powers of two and not; the smallest first, so that hypothesis shrinks to them."""


def world_sizes(most: int = 16) -> st.SearchStrategy[int]:
    """Numbers of ranks."""
    return st.sampled_from([size for size in WORLD_SIZES if size <= most])


@st.composite
def inputs(
    draw: st.DrawFn,
    *,
    sizes: st.SearchStrategy[int] | None = None,
    numels: st.SearchStrategy[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """One 1-D tensor per rank, all of one length, of small integers: their sums are exact in any order.

    Among them zeros, constants, ties, and single spikes.
    """
    size = draw(sizes if sizes is not None else world_sizes())
    numel = draw(numels if numels is not None else st.integers(0, 60))
    return [draw(_vector(numel)).to(dtype) for _ in range(size)]


def worlds(size: int) -> Iterator[SimulatedWorld]:
    """Worlds that differ in order of delivery, speed of links and of ranks: results must not."""
    yield SimulatedWorld(size)
    yield SimulatedWorld(size, seed=1, jitter=1e-3)
    yield SimulatedWorld(size, Link(1e-3, 0.0), seed=2, slowdown=[1.0 + rank for rank in range(size)])


def _itself(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def check_laws(
    collective: Callable[[Communicator, X], R],
    inputs: Sequence[X],
    *,
    dense: Callable[[X], Tensor] = _itself,
    total: Callable[[R], Tensor] = _itself,
    dropped: Callable[[R], Tensor] | None = None,
    traffic: Callable[[int, int], tuple[int, int]] | None = None,
    comm: Communicator | None = None,
) -> list[R]:
    """Asserts conservation, agreement, bytes, and that worlds agree; returns the results in rank order.

    Integers add to the same bits in any order. So where the inputs are tensors of floats, agreement is asserted once
    more of parts of them, whose sums round.

    collective(comm, x): called on every rank with that rank's input, which it must not change.
    dense(x): the input as a dense tensor of exactly summable values (integers).
    total(result), dropped(result): the sum that it returns, and what this rank must put back in its residual.
    traffic(rank, size): bytes, slots included, and messages that a rank sends by the algorithm's expression.
    comm: a communicator of a real world of len(inputs) ranks; this process then runs the collective in one simulated
        world and there, with its rank's input, and must get the same bits.
    """
    size, given = len(inputs), [dense(x).clone() for x in inputs]
    results: list[R] = []
    for world in worlds(size) if comm is None else [SimulatedWorld(size)]:
        again = world.run(lambda c: collective(c, inputs[c.rank]))
        results = results or again
        for rank in range(size):
            _same_bits(dense(inputs[rank]), given[rank], f"input: the collective changed that of rank {rank} of {size}")
            sent = world.bytes_sent[rank], world.messages_sent[rank]
            _check_rank(rank, again[rank], results, sent, total, dropped, traffic)
    _check_conservation(results, given, total, dropped)
    if comm is None:
        _check_order(collective, inputs, total)
    else:
        assert comm.size == size, f"{size} inputs for {comm.size} ranks"
        nbytes, messages = comm.bytes_sent, comm.messages_sent
        real = collective(comm, inputs[comm.rank])
        sent = comm.bytes_sent - nbytes, comm.messages_sent - messages
        _check_rank(comm.rank, real, results, sent, total, dropped, traffic)
    return results


def _check_rank(
    rank: int,
    result: R,
    expected: list[R],
    sent: tuple[int, int],
    total: Callable[[R], Tensor],
    dropped: Callable[[R], Tensor] | None,
    traffic: Callable[[int, int], tuple[int, int]] | None,
) -> None:
    """Asserts agreement with rank 0's total of the first world, that worlds agree on what was dropped, and bytes."""
    size = len(expected)
    _same_bits(
        total(result), total(expected[0]), f"agreement: rank {rank} against rank 0 of {size}, in the first world"
    )
    if dropped is not None:
        _same_bits(dropped(result), dropped(expected[rank]), f"worlds: what rank {rank} dropped")
    if traffic is not None:
        assert sent == traffic(rank, size), f"bytes: rank {rank} of {size}: {sent} != {traffic(rank, size)}"


def _check_order(
    collective: Callable[[Communicator, X], R], inputs: Sequence[Any], total: Callable[[R], Tensor]
) -> None:
    """Asserts agreement of floats whose sums depend on the order of adding, which two ranks have in common anyway."""
    if len(inputs) < 3 or not all(isinstance(x, Tensor) and x.is_floating_point() for x in inputs):
        return
    parts = [x / (rank + 3) for rank, x in enumerate(inputs)]
    first: list[R] = []
    for world in worlds(len(inputs)):
        again = world.run(lambda c: collective(c, parts[c.rank]))
        first = first or again
        for rank, result in enumerate(again):
            what = f"rank {rank} against rank 0 of {len(inputs)} in the first world, on floats whose sums round"
            _same_bits(total(result), total(first[0]), f"agreement: {what}: do all add in one order?")


def _check_conservation(
    results: list[R], inputs: list[Tensor], total: Callable[[R], Tensor], dropped: Callable[[R], Tensor] | None
) -> None:
    given = torch.stack([x.double() for x in inputs]).sum(0)
    kept = total(results[0]).double()
    for result in results:
        if dropped is not None:
            kept = kept + dropped(result).double()
    differs = first_difference(kept + 0.0, given + 0.0)  # 0 is −0 here
    assert torch.equal(given, kept), f"conservation: total + dropped is not the sum of inputs, integers: {differs}"


def _same_bits(a: Tensor, b: Tensor, what: str) -> None:
    """Asserts that tensors are equal as bytes: NaN equals itself here, and 0 is not −0."""
    differs = first_difference(a, b)
    assert not differs, f"{what}: {differs}"


def first_difference(given: Tensor, expected: Tensor) -> str:
    """First place where two tensors differ, bit for bit, and in how many elements; empty where they are equal."""
    if (given.shape, given.dtype) != (expected.shape, expected.dtype):
        return f"{given.dtype} of shape {tuple(given.shape)}, expected {expected.dtype} of {tuple(expected.shape)}"
    both = [x.contiguous().view(-1, 1) for x in (given, expected)]
    at = torch.ne(*(x.view(torch.uint8) for x in both)).any(1).nonzero().view(-1).tolist()
    if not at:
        return ""
    first, wanted = (x[at[0]].item() for x in both)
    return f"{len(at)} of {len(both[0])} elements differ, element {at[0]} is {first!r}, expected {wanted!r}"


def _vector(numel: int) -> st.SearchStrategy[Tensor]:
    integers = st.lists(st.integers(-9, 9), min_size=numel, max_size=numel)
    ties = st.lists(st.sampled_from([-1, 1]), min_size=numel, max_size=numel)
    constant = st.integers(-3, 3).map(lambda value: [value] * numel)
    spike = st.integers(0, max(numel - 1, 0)).map(lambda at: [50 * (i == at) for i in range(numel)])
    return st.one_of(integers, ties, constant, spike).map(lambda values: torch.tensor(values, dtype=torch.float64))
