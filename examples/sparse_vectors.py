"""Sparse vectors as they travel: bytes of each form, sums that lose nothing, and shares of what was cut.

python examples/sparse_vectors.py
"""

import torch
from sparse_compress import (
    HEADER_BYTES,
    MAX_NUMEL,
    DenseCodec,
    SparseVector,
    WireCodec,
    add,
    index_entropy,
    merge,
    pad,
    share,
    topk,
    wire_nbytes,
)

NUMEL, K, RANKS = 1_000_000, 10_000, 4


def sizes(gradient: torch.Tensor) -> None:
    """What a rank would send."""
    assert gradient.numel() <= MAX_NUMEL
    vector = topk(gradient, K)
    assert vector.nbytes == wire_nbytes(K) == HEADER_BYTES + 8 * K  # known before anything is selected
    print(f"{'dense':>24}: {4 * NUMEL:9,} bytes")
    for values in ("bf16", "int8"):
        print(f"{f'dense {values}':>24}: {DenseCodec(values).nbytes(NUMEL):9,} bytes")
    print(f"{'sparse':>24}: {vector.nbytes:9,} bytes")
    for values, indices in (("fp32", "packed"), ("bf16", "packed"), ("int8", "packed")):
        codec = WireCodec(values=values, indices=indices)
        rounded, error = codec.split(vector)
        received = codec.decode(codec.encode(rounded), NUMEL)
        assert torch.equal(received.to_dense() + error.to_dense(), vector.to_dense())  # nothing is lost
        print(f"{f'sparse {values}, {indices}':>24}: {codec.nbytes(K, NUMEL):9,} bytes")
    print(f"no code for the indices takes fewer than {index_entropy(K, NUMEL):.2f} bytes an entry")


def sums() -> None:
    """a + b, whole and cut; integers, so that sums are exact."""
    draw = torch.Generator().manual_seed(1)
    a, b = (topk(torch.randint(-99, 99, (NUMEL,), generator=draw).float(), K) for _ in range(2))
    kept, cut = merge(a, b, K)
    assert len(kept) == K
    assert torch.equal(add(kept, cut).to_dense(), add(a, b).to_dense())
    returned = SparseVector.empty(NUMEL)
    for rank in range(RANKS):  # every rank has cut the same: each takes its share of that into its residual
        returned = add(returned, share(cut, rank, of=RANKS))
    assert torch.equal(returned.to_dense(), cut.to_dense())
    assert pad(SparseVector.empty(NUMEL), K).nbytes == kept.nbytes  # a selection of fewer, in a message of fixed size
    print(f"{len(a)} and {len(b)} entries: {len(kept)} kept, {len(cut)} cut, in {RANKS} shares")


if __name__ == "__main__":
    sizes(torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
    sums()
