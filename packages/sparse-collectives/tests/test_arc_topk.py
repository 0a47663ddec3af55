"""ARC-Top-k: rows that ranks agree on by a summed sketch."""

import pytest
import torch
from communicators import SLOT_BYTES, Alone, SimulatedWorld, allreduce, testing
from hypothesis import given
from hypothesis import strategies as st
from sparse_collectives import ARCTopK, sparse_allreduce
from sparse_collectives.algorithms.arc_topk import _sketch
from sparse_collectives.testing import check_sparse_call, check_sparse_laws
from sparse_compress import topk

pytestmark = pytest.mark.quick


def totals(dense, k, calls=1):
    """Of the last of several calls with one state, on every rank; rows have four elements."""

    def body(comm):
        own, state = topk(dense[comm.rank], len(dense[0])), {"step": 0}
        for _ in range(calls):
            result = sparse_allreduce(own, comm, k=k, algorithm=ARCTopK(width=4), state=state)
        return result.total.to_dense()

    return SimulatedWorld(len(dense)).run(body)


@pytest.mark.parametrize("width", [3, 64])
def test_laws(width):
    check_sparse_laws(ARCTopK(width=width), max_examples=20)


@given(dtype=st.sampled_from([torch.float32, torch.float64]), width=st.integers(1, 70), data=st.data())
def test_laws_of_any_rows(dtype, width, data):
    dense = data.draw(testing.inputs(numels=st.integers(1, 60), dtype=dtype))
    k = data.draw(st.integers(1, len(dense[0]) + 3), label="k")
    check_sparse_call(ARCTopK(width=width), [topk(x, len(x)) for x in dense], k=k)


def test_rows_are_chosen_by_their_sum_and_not_by_what_one_rank_has():
    dense = torch.zeros(2, 12)
    dense[:, 1] = torch.tensor([9.0, -9.0])
    dense[:, 10] = 1
    for total in totals(dense, 4):
        assert total.nonzero().tolist() == [[10]]


def test_a_call_without_a_row_that_is_chosen_draws_other_signs_next_time():
    row = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, -3.0, 3.0, -3.0])  # of two rows either is larger, as signs fall
    chosen = {tuple(totals([row], 4, calls=calls)[0].nonzero().view(-1).tolist()) for calls in range(1, 30)}
    assert chosen == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_everything_is_summed_as_dense_does_bit_for_bit():
    dense = torch.randn(5, 1001, generator=torch.Generator().manual_seed(0))
    expected = SimulatedWorld(5).run(lambda comm: allreduce(dense[comm.rank].clone(), comm))
    assert all(map(torch.equal, totals(dense, 1001), expected))


def test_rows_of_huge_finite_numbers_do_not_hide_an_inf():
    dense = torch.full((3, 12), torch.finfo(torch.float32).max) / 4
    dense[1, 9] = torch.inf
    for total in totals(dense, 4):
        assert total.isinf().nonzero().tolist() == [[9]]


def test_nan_of_any_bits_chooses_the_same_rows(monkeypatch):
    """A GPU may make another NaN of a sum than a processor."""
    chosen = []
    for bits in (0x7FC00000, 0x7FFFFFFF):
        sketches = [torch.tensor([0x7FC00001, 0, bits], dtype=torch.int32).view(torch.float32)]

        def summed(x, rank, size, sketches=sketches):
            return sketches.pop() if sketches else x
            yield

        monkeypatch.setattr("sparse_collectives.algorithms.arc_topk.schedules.allreduce", summed)
        with pytest.raises(StopIteration) as end:
            next(ARCTopK(width=4).schedule(topk(torch.arange(12.0), 12), 0, 2, 4))
        chosen.append(end.value.value.total.indices.tolist())
    assert chosen == [[0, 1, 2, 3]] * 2


def test_a_sketch_is_not_made_in_half_precision():
    with torch.autocast("cpu", torch.bfloat16):
        check_sparse_call(ARCTopK(width=4), [topk(torch.arange(33.0), 33)], k=8)
        assert _sketch(torch.ones(3, 4), 0, 2).dtype == torch.float32


def test_bytes_do_not_grow_with_the_number_of_ranks():
    n, k, width = 1 << 20, 1 << 14, 64
    sketch = 4 * n // width
    for size in (2**power for power in range(1, 11)):
        sent = ARCTopK(width=width).sent(0, size, k, n, torch.float32)
        assert sent.nbytes - SLOT_BYTES * sent.messages < 2 * (4 * k + sketch)


def test_a_width_that_no_row_has():
    with pytest.raises(ValueError, match="width is 0, expected 1 element"):
        sparse_allreduce(topk(torch.ones(9), 3), Alone(), k=3, algorithm=ARCTopK(width=0))
