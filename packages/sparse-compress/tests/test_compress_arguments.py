"""Arguments that are wrong by type or range: a TypeError or a ValueError that says what was given and expected."""

import numpy as np
import pytest
import torch
from sparse_compress import (
    ByParts,
    DenseCodec,
    DGCTopK,
    ErrorFeedback,
    GaussianK,
    LargestOfBlocks,
    RandomK,
    Selection,
    SparseVector,
    Threshold,
    ThresholdReuse,
    TopK,
    WarmUp,
    WireCodec,
    clip_locally,
    cut_to_budgets,
    merge,
    merge_to_budgets,
    pad,
    share,
    topk,
)
from sparse_compress.selection import ANY

pytestmark = pytest.mark.quick

NO_NUMBERS = ("x", True, None, [0.1], 0.1j, torch.ones(1))
OUT_OF_RANGE = (0, 0.0, -0.1, 1.001, 2, float("nan"), float("inf"))
DENSE = {"TopK": TopK, "RandomK": RandomK, "DGCTopK": DGCTopK, "GaussianK": GaussianK, "ThresholdReuse": ThresholdReuse}
x, vector = torch.arange(9.0), topk(torch.arange(9.0), 3)


@pytest.mark.parametrize("make", [*DENSE.values(), lambda d: Threshold(1.0, d), lambda d: DGCTopK(sample=d)])
@pytest.mark.parametrize(
    ("given", "error"),
    [*((value, TypeError) for value in NO_NUMBERS), *((value, ValueError) for value in OUT_OF_RANGE)],
    ids=str,
)
def test_shares(make, given, error):
    with pytest.raises(error, match=r"(density|sample) is .*expected .*0 < (density|sample) ≤ 1"):
        make(given)


@pytest.mark.parametrize("make", DENSE.values())
def test_a_density_that_is_set_later(make):
    compressor = make(0.1)
    for wrong, error in (("x", TypeError), (True, TypeError), (2, ValueError), (float("nan"), ValueError)):
        with pytest.raises(error, match="density is"):
            compressor.density = wrong
    assert compressor.entries(100) == 10
    compressor.density = np.float32(0.5)
    assert compressor.entries(100) == 50


WRONG = {
    "threshold text": (lambda: Threshold("x"), TypeError, "threshold is 'x'"),
    "threshold bool": (lambda: Threshold(True), TypeError, "threshold is True"),
    "threshold nan": (lambda: Threshold(float("nan")), ValueError, "threshold is nan"),
    "threshold inf": (lambda: Threshold(float("inf")), ValueError, "threshold is inf"),
    "every float": (lambda: ThresholdReuse(every=2.0), TypeError, "every is 2.0"),
    "every bool": (lambda: ThresholdReuse(every=True), TypeError, "every is True"),
    "seed text": (lambda: RandomK(seed="x"), TypeError, "seed is 'x'"),
    "unbiased text": (lambda: RandomK(unbiased="no"), TypeError, "unbiased is 'no'"),
    "parts of what is no compressor": (lambda: ByParts("topk", [3]), TypeError, "compressor is 'topk'"),
    "parts of a class": (lambda: ByParts(TopK, [3]), TypeError, r"TopK\(\)"),
    "parts of floats": (lambda: ByParts(TopK(), [3.0]), TypeError, "part 0 has 3.0"),
    "parts of bools": (lambda: ByParts(TopK(), [True]), TypeError, "part 0 has True"),
    "negative parts": (lambda: ByParts(TopK(), [3, -1]), ValueError, "part 1 has -1"),
    "parts of a shape with a negative": (lambda: ByParts(TopK(), [(3, -1)]), ValueError, "part 0 has -1"),
    "parts of a number": (lambda: ByParts(TopK(), 3), TypeError, "shapes is 3"),
    "feedback of a class": (lambda: ErrorFeedback(TopK), TypeError, r"TopK\(\)"),
    "feedback of text": (lambda: ErrorFeedback("topk"), TypeError, "compressor is 'topk'"),
    "momentum text": (lambda: ErrorFeedback(TopK(), momentum="0.9"), TypeError, "momentum is '0.9'"),
    "momentum bool": (lambda: ErrorFeedback(TopK(), momentum=True), TypeError, "momentum is True"),
    "momentum nan": (lambda: ErrorFeedback(TopK(), momentum=float("nan")), ValueError, "momentum is nan"),
    "warm-up of half a step": (lambda: WarmUp(0.1, 1.5), TypeError, "steps is 1.5"),
    "warm-up of less than none": (lambda: WarmUp(0.1, -1), ValueError, "steps is -1"),
    "warm-up to 2": (lambda: WarmUp(2, 4), ValueError, "density is 2"),
    "warm-up from text": (lambda: WarmUp(0.1, 4, ["x"]), TypeError, "stage 0 is 'x'"),
    "warm-up from 2": (lambda: WarmUp(0.1, 4, [0.5, 2]), ValueError, "stage 1 is 2"),
    "warm-up from nothing": (lambda: WarmUp(0.1, 4, []), ValueError, "stages is empty"),
    "clipping a tensor": (lambda: clip_locally(x, 1.0, 2), TypeError, r"\[tensor\]"),
    "clipping to text": (lambda: clip_locally([x], "1", 2), TypeError, "max_norm is '1'"),
    "clipping to nan": (lambda: clip_locally([x], float("nan"), 2), ValueError, "max_norm is nan"),
    "clipping to 0": (lambda: clip_locally([x], 0.0, 2), ValueError, "max_norm is 0.0"),
    "clipping for 0 ranks": (lambda: clip_locally([x], 1.0, 0), ValueError, "ranks is 0"),
    "clipping for half a rank": (lambda: clip_locally([x], 1.0, 0.5), TypeError, "ranks is 0.5"),
    "k float": (lambda: topk(x, 2.0), TypeError, "k is 2.0"),
    "k bool": (lambda: topk(x, True), TypeError, "k is True"),
    "topk of a list": (lambda: topk([1.0], 1), TypeError, "tensor is list"),
    "topk of an array": (lambda: topk(np.ones(3), 1), TypeError, "tensor is ndarray"),
    "compressing a list": (lambda: TopK()([1.0]), TypeError, "tensor is list"),
    "feedback of a list": (lambda: ErrorFeedback(TopK()).compress("w", [1.0]), TypeError, "'w' is list"),
    "topk of nested": (lambda: topk(torch.nested.nested_tensor([x, x]), 1), TypeError, "nested"),
    "topk of mkldnn": (lambda: topk(x.to_mkldnn(), 1), TypeError, "layout"),
    "topk of quantized": (lambda: topk(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), 1), TypeError, "qint8"),
    "merging to a float": (lambda: merge(vector, vector, 2.0), TypeError, "k is 2.0"),
    "merging tensors": (lambda: merge(x, x, 2), TypeError, "Tensor"),
    "padding to a bool": (lambda: pad(vector, True), TypeError, "count is True"),
    "sharing among halves": (lambda: share(vector, 0.0, 1), TypeError, "member is 0.0"),
    "indices in a list": (lambda: SparseVector([1], torch.ones(1), 3), TypeError, "indices is list"),
    "values in a list": (lambda: SparseVector(torch.ones(1).int(), [1.0], 3), TypeError, "values is list"),
    "numel bool": (lambda: SparseVector(torch.zeros(1).int(), torch.ones(1), True), TypeError, "numel is True"),
    "empty of a float": (lambda: SparseVector.empty(2.0), TypeError, "numel is 2.0"),
    "unpacking bytes": (lambda: SparseVector.unpack(b"123"), TypeError, "bytes"),
    "codec of numbers": (lambda: WireCodec(8), ValueError, "values=8"),
    "codec of lists": (lambda: WireCodec(["bf16"], ["raw"]), ValueError, "values="),
    "dense codec of lists": (lambda: DenseCodec(["bf16"]), ValueError, "values="),
}


SOME_BLOCKS = {
    "beyond the end": ([(0, 5), (5, 90)], [1, 1]),
    "that overlap": ([(0, 6), (5, 9)], [1, 1]),
    "out of order": ([(5, 9), (0, 5)], [1, 1]),
    "smaller than a budget": ([(0, 1), (1, 9)], [2, 1]),
    "of less than nothing": ([(0, 5), (5, 9)], [3, -1]),
    "without a budget": ([(0, 5), (5, 9)], [1]),
}
BLOCKS = SOME_BLOCKS | {"short of the end": ([(0, 5)], [1]), "with a gap": ([(0, 4), (5, 9)], [1, 1])}


class Planned(Selection):
    def __init__(self, bounds, budgets):
        self.blocks = list(zip(bounds, budgets, strict=False))

    def plan(self, numel):
        return self.blocks, ANY


TAKES = {
    "selecting": lambda *blocks: LargestOfBlocks(*blocks)(x),
    "a step": lambda *blocks: ErrorFeedback(TopK()).compress("w", x, select=LargestOfBlocks(*blocks)),
    "a plan": lambda *blocks: ErrorFeedback(TopK()).compress("w", x, select=Planned(*blocks)),
    "cutting": lambda *blocks: cut_to_budgets(vector, *blocks),
    "merging": lambda *blocks: merge_to_budgets(vector, vector, *blocks),  # also of some blocks
}


@pytest.mark.parametrize(
    ("take", "blocks"), [(t, b) for t in TAKES for b in (SOME_BLOCKS if t == "merging" else BLOCKS)]
)
def test_wrong_blocks(take, blocks):
    with pytest.raises(ValueError, match=r"blocks .* expected \[low, high\) in order"):
        TAKES[take](*BLOCKS[blocks])


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, error, says = WRONG[case]
    with pytest.raises(error, match=says):
        call()


def test_numbers_of_any_kind():
    for density in (np.float32(0.5), np.float64(0.5), 0.5):
        assert TopK(density).entries(10) == 5
    assert topk(x, np.int64(2)).indices.tolist() == topk(x, torch.tensor(2)).indices.tolist() == [7, 8]
    assert TopK(1).entries(7) == 7
