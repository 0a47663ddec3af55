"""How the vectors of a collective travel: as they are, or in a codec's fewer bytes.

Who sends rounded values computes with them too, so that all ranks hold the same bits; what rounding leaves over is
dropped, and so waits in one residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from communicators import Payload
from sparse_compress import SparseVector, WireCodec, vectors
from sparse_compress.codecs.rounding import VALUES
from sparse_compress.vector_format import OWN_HEADER_BYTES, WIRE_DTYPES
from torch import Tensor

from sparse_collectives.wire.entries import body_nbytes, from_body, join_bodies, join_in_order
from sparse_collectives.wire.invalid import blame_rank

Span = tuple[int, int]
"""[low, high): the part of the index range in which a block's entries lie."""


class Wire(Protocol):
    """Encoding of entries. A message stands alone, with a header; a block needs a caller that knows its span.

    What is sent was rounded before: packing loses nothing. Sizes follow from the number of entries, so where that is
    known nothing is read back from a GPU.

    `vector` and `entries` refuse bytes of another length by a ValueError, and on a CPU what is no vector or not all in
    the span; indices on a GPU are trusted, because looking at them would wait for it.

    Attributes:
        name: Its key in `WIRES`.
        overhead: Bytes by which blocks together may exceed one block with all their entries in all their spans, for
            each of them; and by which a block may exceed one with more entries in the same span.
    """

    name: str
    overhead: int

    def rounded(self, sparse: SparseVector) -> tuple[SparseVector, SparseVector]:
        """(values to send, residual): their sum is the vector, exactly; NaN and inf leave no residual."""

    def nbytes(self, entries: int, numel: int, dtype: torch.dtype) -> int:
        """Bytes of a message's body."""

    def message(self, sparse: SparseVector) -> Payload:
        """The vector as a message, which may be in the vector's own memory."""

    def vector(self, message: Payload, entries: int, like: SparseVector) -> SparseVector:
        """The vector of a message that holds so many entries."""

    def block_nbytes(self, entries: int, length: int, dtype: torch.dtype) -> int:
        """Bytes of a block of so many entries, all in a span of so many elements."""

    def block(self, sparse: SparseVector, span: Span) -> Tensor:
        """The entries, which all lie in the span, as uint8."""

    def entries(self, block: Tensor, span: Span, like: SparseVector, count: int | None = None) -> SparseVector:
        """The entries of a block.

        Args:
            block: uint8, 1-D.
            span: Where they all lie.
            like: A vector of the whole's numel and dtype.
            count: How many, where that is known.
        """

    def dense_nbytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of a block's values without indices."""

    def dense(self, values: Tensor) -> Tensor:
        """The values of all elements of a span, as uint8."""

    def values(self, dense: Tensor, length: int, like: SparseVector) -> Tensor:
        """Decodes the bytes that `dense` made."""


class AsTheyAre:
    """Values in 4 bytes (float64: 8), indices in 4. A block is entries only, and its length says how many."""

    name = "fp32"
    overhead = 0

    def rounded(self, sparse: SparseVector) -> tuple[SparseVector, SparseVector]:
        return sparse, SparseVector.allocate(0, sparse.numel, sparse.dtype, sparse.device)

    def nbytes(self, entries: int, numel: int, dtype: torch.dtype) -> int:
        return OWN_HEADER_BYTES + body_nbytes(entries, dtype)

    def message(self, sparse: SparseVector) -> Payload:
        return Payload(sparse.pack())

    def vector(self, message: Payload, entries: int, like: SparseVector) -> SparseVector:
        return SparseVector.unpack(message.memory, like=like)

    def block_nbytes(self, entries: int, length: int, dtype: torch.dtype) -> int:
        return body_nbytes(entries, dtype)

    def block(self, sparse: SparseVector, span: Span) -> Tensor:
        return sparse.body

    def entries(self, block: Tensor, span: Span, like: SparseVector, count: int | None = None) -> SparseVector:
        sparse = from_body(block, span, like)
        if count is not None and len(sparse) != count:
            raise ValueError(f"{len(sparse)} entries given, expected {count}")
        return sparse

    def dense_nbytes(self, length: int, dtype: torch.dtype) -> int:
        return length * WIRE_DTYPES[dtype].itemsize

    def dense(self, values: Tensor) -> Tensor:
        return values.view(torch.uint8)

    def values(self, dense: Tensor, length: int, like: SparseVector) -> Tensor:
        return dense.clone().view(like.dtype)


class Coded:
    """Wire of a `WireCodec`. A block is a message's body: 16 bytes of header, then indices from the span's low.

    Packed indices in l planes and a unary part take the minimum over l of k·(l + 1) + n/2^l bits, which is
    superadditive in (k, n): separate blocks never take more, except for headers, int8's scale, and the padding of
    planes, parts and words.
    """

    overhead = 16 + 8 + 32 + 8

    def __init__(self, values: str, indices: str) -> None:
        self.name = values if indices == "raw" else f"{values}-{indices}"
        self._codec, self._kind = WireCodec(values, indices), VALUES[values]

    def rounded(self, sparse: SparseVector) -> tuple[SparseVector, SparseVector]:
        if self._kind is VALUES["fp32"]:
            return PLAIN.rounded(sparse)
        return self._codec.split(sparse)

    def nbytes(self, entries: int, numel: int, dtype: torch.dtype) -> int:
        return self._codec.block_nbytes(entries, numel)

    def message(self, sparse: SparseVector) -> Payload:
        return Payload(self._codec.encode(sparse))

    def vector(self, message: Payload, entries: int, like: SparseVector) -> SparseVector:
        return self._codec.decode(message.memory, like.numel, entries)

    def block_nbytes(self, entries: int, length: int, dtype: torch.dtype) -> int:
        return self._codec.block_nbytes(entries, length)

    def block(self, sparse: SparseVector, span: Span) -> Tensor:
        low, high = span
        return self._codec.encode_block(vectors.of_entries(sparse.indices - low, sparse.values, high - low))

    def entries(self, block: Tensor, span: Span, like: SparseVector, count: int | None = None) -> SparseVector:
        low, high = span
        sparse = self._codec.decode_block(block, high - low, count)
        return vectors.of_entries(sparse.indices + low, sparse.values, like.numel)

    def dense_nbytes(self, length: int, dtype: torch.dtype) -> int:
        return self._kind.nbytes(length)

    def dense(self, values: Tensor) -> Tensor:
        return self._kind.pack(values)

    def values(self, dense: Tensor, length: int, like: SparseVector) -> Tensor:
        return self._kind.unpack(dense.clone(), length)


PLAIN: Wire = AsTheyAre()

WIRES: dict[str, Wire] = {
    wire.name: wire
    for wire in (
        PLAIN,
        *(Coded(values, "raw") for values in ("bf16", "fp16", "int8")),
        *(Coded(values, "packed") for values in ("fp32", "bf16", "fp16", "int8")),
    )
}
"""Wires of sparse vectors, by the dtype of values, with int32 indices or packed ones."""

DENSE_WIRES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Wires of dense gradients, by the dtype in which they are summed; None: their own."""


def joined(
    wire: Wire,
    blocks: Sequence[Tensor],
    spans: Sequence[Span],
    counts: Sequence[int],
    like: SparseVector,
    ranks: Sequence[int],
) -> SparseVector:
    """The entries of all blocks, which increase from block to block, and of which each holds so many.

    ranks: whose the blocks are. Raises InvalidMessageError where they are not so, on a CPU.
    """
    if wire is PLAIN and like.device.type == "cpu":
        whole = join_bodies(blocks, spans, counts, like)
        if whole is not None:
            return whole
    parts = []  # one by one, so that it is said whose is wrong
    for block, span, count, rank in zip(blocks, spans, counts, ranks, strict=True):
        with blame_rank(rank):
            parts.append((rank, wire.entries(block, span, like, count)))
    return join_in_order(parts)


def wire_named(name: str, *, dtype: torch.dtype = torch.float32) -> Wire:
    """The wire for values of that dtype.

    Raises ValueError that lists the known names, TypeError for what is no name, and for float64 in fewer bytes.
    """
    if not isinstance(name, str):
        raise TypeError(f"wire is {name!r}, expected a name: {', '.join(WIRES)}")
    if name not in WIRES:
        raise ValueError(f"unknown wire {name!r}; known: {', '.join(WIRES)}")
    wire = WIRES[name]
    if wire is not PLAIN and dtype != torch.float32:
        raise TypeError(f"wire={name!r} carries float32 values, but these are {dtype}: leave wire at 'fp32'")
    return wire
