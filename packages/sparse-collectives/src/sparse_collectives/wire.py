"""How the vectors of a collective travel: as they are, or in a codec's fewer bytes; and who sent damaged ones.

Who sends rounded values computes with them too, so that all ranks hold the same bits; what rounding leaves over is
dropped, and so waits in one residual.
"""

from collections.abc import Sequence
from types import TracebackType

import torch
from communicators import Payload
from sparse_compress import FREE_BYTES, HEADER_BYTES, DenseCodec, SparseVector, WireCodec, vectors, wire_nbytes
from torch import Tensor

Span = tuple[int, int]
"""[low, high): the part of the index range in which a block's entries lie."""


class Wire:
    """Encoding of entries; this one leaves them as they are: values in 4 bytes (float64: 8), indices in 4.

    A message stands alone, with a header; a block needs a caller that knows its span, and says how many entries it has
    where it knows. What is sent was rounded before: packing loses nothing. Sizes follow from the number of entries, so
    where that is known nothing is read back from a GPU.

    `vector` and `entries` refuse bytes of another length by a ValueError, and on a CPU what is no vector or not all in
    the span; indices on a GPU are trusted, because looking at them would wait for it.

    Attributes:
        name: Its key in `WIRES`.
        overhead: Bytes by which blocks together may exceed one block with all their entries in all their spans, for
            each of them; and by which a block may exceed one with more entries in the same span.
    """

    name = "fp32"
    overhead = 0

    def rounded(self, sparse: SparseVector) -> tuple[SparseVector, SparseVector]:
        """Splits a vector into (values to send, residual): their sum is the vector, exactly; NaN and inf leave none.

        Args:
            sparse: Vector.
        """
        return sparse, SparseVector.allocate(0, sparse.numel, sparse.dtype, sparse.device)

    def nbytes(self, entries: int, numel: int, dtype: torch.dtype) -> int:
        """Bytes of a message's body.

        Args:
            entries: Number of entries.
            numel: Elements of the whole vector.
            dtype: Of the gradient.
        """
        return wire_nbytes(entries, dtype) - FREE_BYTES

    def message(self, sparse: SparseVector) -> Payload:
        """The vector as a message, which may be in the vector's own memory.

        Args:
            sparse: Vector, rounded.
        """
        return Payload(sparse.pack())

    def vector(self, message: Payload, entries: int, like: SparseVector) -> SparseVector:
        """The vector of a message.

        Args:
            message: As `message` made it.
            entries: Number of entries that it holds.
            like: Vector of its numel and dtype.
        """
        return SparseVector.unpack(message.memory, like=like)

    def block_nbytes(self, entries: int, length: int, dtype: torch.dtype) -> int:
        """Bytes of a block.

        Args:
            entries: Number of entries.
            length: Elements of the span that they all lie in.
            dtype: Of the gradient.
        """
        return wire_nbytes(entries, dtype) - HEADER_BYTES

    def block(self, sparse: SparseVector, span: Span) -> Tensor:
        """The entries as uint8.

        Args:
            sparse: Vector, rounded.
            span: Where all of its entries lie.
        """
        return sparse.body

    def entries(self, block: Tensor, span: Span, like: SparseVector, count: int | None = None) -> SparseVector:
        """The entries of a block.

        Args:
            block: uint8, 1-D.
            span: Where they all lie.
            like: A vector of the whole's numel and dtype.
            count: How many, where that is known.
        """
        entries, rest = divmod(block.numel(), self.block_nbytes(1, 1, like.dtype))
        if rest:
            raise ValueError(f"{block.numel()} bytes are no whole number of {like.dtype} entries")
        if count is not None and entries != count:
            raise ValueError(f"{entries} entries given, expected {count}")
        sparse = SparseVector.allocate(entries, like.numel, like.dtype, block.device)
        sparse.body.copy_(block)
        if block.is_cpu:
            vectors.check_entries(sparse, *span)
        return sparse

    def dense_nbytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of a block's values without indices.

        Args:
            length: Elements of the span.
            dtype: Of the gradient.
        """
        return length * torch.promote_types(dtype, torch.float32).itemsize

    def dense(self, values: Tensor) -> Tensor:
        """The values of all elements of a span, as uint8.

        Args:
            values: Of the vector's dtype.
        """
        return values.view(torch.uint8)

    def values(self, dense: Tensor, length: int, like: SparseVector) -> Tensor:
        """Decodes the bytes that `dense` made.

        Args:
            dense: uint8, 1-D.
            length: Elements of the span.
            like: Vector of the dtype.
        """
        return dense.clone().view(like.dtype)


class CodedWire(Wire):
    """Wire of a `WireCodec`. A block is a message's body: 16 bytes of header, then indices from the span's low.

    Packed indices in l planes and a unary part take the minimum over l of k·(l + 1) + n/2^l bits, which is
    superadditive in (k, n): separate blocks never take more, except for headers, int8's scale, and the padding of
    planes, parts and words.
    """

    overhead = 16 + 8 + 32 + 8

    def __init__(self, values: str, indices: str) -> None:
        self.name = values if indices == "raw" else f"{values}-{indices}"
        self._codec, self._dense, self._rounds = WireCodec(values, indices), DenseCodec(values), values != "fp32"

    def rounded(self, sparse: SparseVector) -> tuple[SparseVector, SparseVector]:
        return self._codec.split(sparse) if self._rounds else super().rounded(sparse)

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
        return self._dense.nbytes(length)

    def dense(self, values: Tensor) -> Tensor:
        return self._dense.encode(values)

    def values(self, dense: Tensor, length: int, like: SparseVector) -> Tensor:
        return self._dense.decode(dense, length)


RAW = Wire()

WIRES: dict[str, Wire] = {
    wire.name: wire
    for wire in (
        RAW,
        *(CodedWire(values, "raw") for values in ("bf16", "fp16", "int8")),
        *(CodedWire(values, "packed") for values in ("fp32", "bf16", "fp16", "int8")),
    )
}
"""Wires of sparse vectors, by the dtype of values, with int32 indices or packed ones."""

DENSE_WIRES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Wires of dense gradients, by the dtype in which they are summed; None: their own."""


def wire_named(name: str, *, dtype: torch.dtype = torch.float32) -> Wire:
    """The wire for values of that dtype.

    Raises ValueError that lists the known names, TypeError for what is no name, and for float64 in fewer bytes.
    """
    if not isinstance(name, str):
        raise TypeError(f"wire is {name!r}, expected a name: {', '.join(WIRES)}")
    if name not in WIRES:
        raise ValueError(f"unknown wire {name!r}; known: {', '.join(WIRES)}")
    wire = WIRES[name]
    if wire is not RAW and dtype != torch.float32:
        raise TypeError(f"wire={name!r} carries float32 values, but these are {dtype}: leave wire at 'fp32'")
    return wire


class InvalidMessageError(ValueError):
    """Invalid bytes. rank: their sender, as the schedule numbers its peers; None if several ranks made them."""

    def __init__(self, rank: int | None, problem: str) -> None:
        whose = "what the ranks gave together" if rank is None else f"rank {rank} gave what"
        super().__init__(f"{whose} is no valid message: {problem}")
        self.rank, self.problem = rank, problem


class blame_rank:  # noqa: N801 - a class, because a generator as a context takes twice as many calls a message
    """Context that blames a rank's bytes for a ValueError, by raising an InvalidMessageError, which is one, instead.

    Args:
        rank: As the schedule numbers its peers.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, ValueError) and not isinstance(error, InvalidMessageError):
            raise InvalidMessageError(self._rank, str(error)) from error


def joined(
    wire: Wire, blocks: list[Tensor], spans: list[Span], counts: Sequence[int], like: SparseVector, ranks: Sequence[int]
) -> SparseVector:
    """The entries of all blocks, which increase from block to block, and of which each holds so many.

    ranks: whose the blocks are. Raises InvalidMessageError where they are not so, on a CPU.
    """
    whole = _joined_raw(blocks, spans, counts, like) if wire is RAW and like.is_cpu else None
    if whole is not None:
        return whole
    parts = []  # one by one, so that it is said whose is wrong
    for block, span, count, rank in zip(blocks, spans, counts, ranks, strict=True):
        with blame_rank(rank):
            parts.append((rank, wire.entries(block, span, like, count)))
    return join_in_order(parts)


def join_in_order(parts: Sequence[tuple[int, SparseVector]]) -> SparseVector:
    """Joins what ranks have given, with each of them.

    Raises InvalidMessageError where indices do not increase from rank to rank, on a CPU.
    """
    last = -1
    for rank, part in parts:
        if part.is_cpu and len(part):
            indices = part.indices.numpy()
            if indices[0] <= last:
                raise InvalidMessageError(rank, f"index {indices[0]} comes after {last} of a rank before")
            last = int(indices[-1])
    return vectors.join([part for _, part in parts])


def _joined_raw(
    blocks: list[Tensor], spans: list[Span], counts: Sequence[int], like: SparseVector
) -> SparseVector | None:
    """Joins raw blocks on a CPU straight from their bytes; None where that gives no vector, or one beyond the spans."""
    width, entry = like.dtype.itemsize, RAW.block_nbytes(1, 1, like.dtype)
    if any(block.numel() != count * entry for block, count in zip(blocks, counts, strict=True)):
        return None
    starts = [block.data_ptr() for block in blocks]
    whole = vectors.copied_runs([(at + width * n, at, n) for at, n in zip(starts, counts, strict=True)], like)
    indices, last = whole.indices.numpy(), 0
    for (low, high), count in zip(spans, counts, strict=True):
        first, last = last, last + count
        if count and not low <= indices[first] <= indices[last - 1] < high:
            return None
    try:
        vectors.check_entries(whole, 0, like.numel)
    except ValueError:
        return None
    return whole
