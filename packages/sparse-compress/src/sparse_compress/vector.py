"""A sparse vector that always lives in its own wire form."""

from typing import Self

import torch
from torch import Tensor

from sparse_compress.arguments import check_bytes, element_count
from sparse_compress.order import check_indices
from sparse_compress.put import put
from sparse_compress.vector_format import (
    HEADER_BYTES,
    WIRE_DTYPES,
    Header,
    entry_nbytes,
    read_header,
    wire_nbytes,
    write_header,
)


class SparseVector:
    """``numel`` elements, all zero but for ``values`` at ``indices``.

        >>> SparseVector(torch.tensor([1, 4], dtype=torch.int32), torch.tensor([2.0, -3.0]), 6).to_dense()
        tensor([ 0.,  2.,  0.,  0., -3.,  0.])

    ``indices``: int32, (k,), strictly increasing. ``values``: float32 or float64, (k,); explicit zeros are
    entries like any other. Both are views into one uint8 buffer that has room for the header (``wire``), so
    ``pack`` and ``unpack`` copy nothing. Treat a vector as immutable once it is packed.

    The constructor checks and copies what it is given; float16 and bfloat16 values become float32. It raises
    TypeError for wrong types and dtypes and ValueError for wrong shapes, orders and ranges.
    """

    __slots__ = ("_buffer", "_entries", "_indices", "_unwritten", "_values", "dtype", "numel")

    numel: int
    dtype: torch.dtype
    """float32 or float64."""
    _entries: int
    _buffer: Tensor
    _indices: Tensor | None  # made when they are asked for: many vectors are only passed on, in whole
    _values: Tensor | None
    _unwritten: Header | None  # what the buffer lacks until it is asked for: most vectors never travel

    def __init__(self, indices: Tensor, values: Tensor, numel: int) -> None:
        numel = element_count(numel)
        _check(indices, values, numel)
        header = Header(numel, len(indices), WIRE_DTYPES[values.dtype])
        self._allocate(header, values.device)
        self.indices.copy_(indices)
        self.values.copy_(values.detach())

    def _allocate(self, header: Header, device: torch.device | str) -> None:
        buffer = torch.empty(wire_nbytes(header.entries, header.dtype), dtype=torch.uint8, device=device)
        self._bind(buffer, header)
        self._unwritten = header

    def _bind(self, buffer: Tensor, header: Header) -> None:
        self.numel, self._entries, self.dtype = header
        self._buffer, self._unwritten, self._indices, self._values = buffer, None, None, None

    @classmethod
    def _view(cls, buffer: Tensor, header: Header) -> Self:
        """A vector over the bytes of ``buffer``, which is trusted to hold what the header says."""
        self = cls.__new__(cls)
        self._bind(buffer, header)
        return self

    @classmethod
    def allocate(cls, entries: int, numel: int, dtype: torch.dtype, device: torch.device | str) -> Self:
        """A vector in a new buffer; its indices and values are for the caller to fill. Trusts what it is given."""
        self = cls.__new__(cls)
        self._allocate(Header(numel, entries, dtype), device)
        return self

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype = torch.float32, *, device: torch.device | str | None = None) -> Self:
        """A vector without entries, of the value dtype in which gradients of ``dtype`` travel."""
        if dtype not in WIRE_DTYPES:
            raise TypeError(f"dtype {dtype} given, expected one of {list(WIRE_DTYPES)}")
        return cls.allocate(
            0, element_count(numel), WIRE_DTYPES[dtype], torch.get_default_device() if device is None else device
        )

    @property
    def indices(self) -> Tensor:
        """int32, (k,), strictly increasing."""
        if self._indices is None:
            self._indices = self._buffer[HEADER_BYTES + self._entries * self.dtype.itemsize :].view(torch.int32)
        return self._indices

    @property
    def values(self) -> Tensor:
        """(k,), of ``dtype``."""
        if self._values is None:
            end = HEADER_BYTES + self._entries * self.dtype.itemsize
            self._values = self._buffer[HEADER_BYTES:end].view(self.dtype)
        return self._values

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the first index and the first value, on a CPU."""
        values = self._buffer.data_ptr() + HEADER_BYTES
        return values + self._entries * self.dtype.itemsize, values

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._buffer.device

    @property
    def body(self) -> Tensor:
        """The entries' part of the wire form, 1-D uint8: values, then indices."""
        return self._buffer[HEADER_BYTES:]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return self._buffer.numel()

    def __len__(self) -> int:
        return self._entries

    def __repr__(self) -> str:
        return f"SparseVector(entries={len(self)}, numel={self.numel}, dtype={self.dtype}, device={self.device})"

    def clone(self) -> Self:
        """A copy in memory of its own."""
        return self._view(self.pack().clone(), Header(self.numel, len(self), self.dtype))

    def to_dense(self) -> Tensor:
        """The whole vector, shape (numel,)."""
        return self.put(torch.empty(self.numel, dtype=self.dtype, device=self.device))

    def put(self, out: Tensor, *, divisor: float = 1.0) -> Tensor:
        """Overwrites ``out`` with the whole vector divided by ``divisor``, and returns it.

        ``out``: numel elements of this dtype and device, of any shape; contiguous. Raises ValueError for another.
        """
        if (out.numel(), out.dtype, out.device) != (self.numel, self.dtype, self.device) or not out.is_contiguous():
            raise ValueError(
                f"{self} cannot be put into {out.dtype}, {tuple(out.shape)} on {out.device}: expected a contiguous "
                "tensor of its numel, dtype and device"
            )
        return put(out, self.indices, self.values, divisor=divisor)

    def pack(self) -> Tensor:
        """The wire form, 1-D uint8: this vector's own memory, not a copy."""
        if self._unwritten is not None:
            write_header(self._buffer, self._unwritten)
            self._unwritten = None
        return self._buffer

    @classmethod
    def unpack(cls, buffer: Tensor, *, like: "SparseVector | None" = None) -> Self:
        """The vector that ``pack`` put into ``buffer``, as views of it; only a misaligned slice is copied.

        With ``like``, which tells numel and dtype, nothing is read back from a GPU: the entries follow from
        the length of the buffer. On a CPU the header is read, and compared, in either case, and so are the indices:
        what comes back is a valid vector. Indices on a GPU are trusted, because looking at them would wait for it.
        Raises TypeError for a buffer that is no 1-D contiguous uint8 tensor, ValueError for a corrupted
        or unexpected header, and for indices that do not increase strictly or are beyond numel.
        """
        check_bytes(buffer)
        if buffer.numel() < HEADER_BYTES:
            raise ValueError(f"{buffer.numel()} bytes given, but the header alone has {HEADER_BYTES}")
        if buffer.data_ptr() % 8 or buffer.storage_offset() % 8:
            buffer = buffer.clone()
        if like is not None and not buffer.is_cpu:
            entries, rest = divmod(buffer.numel() - HEADER_BYTES, entry_nbytes(like.dtype))
            if rest:
                raise ValueError(f"{buffer.numel()} bytes are no whole number of {like.dtype} entries")
            return cls._view(buffer, Header(like.numel, entries, like.dtype))
        header = read_header(buffer)
        if like is not None and (header.numel, header.dtype) != (like.numel, like.dtype):
            raise ValueError(
                f"the message holds {header.numel} elements of {header.dtype}, expected {like.numel} of {like.dtype}"
            )
        vector = cls._view(buffer, header)
        if buffer.is_cpu:
            check_indices(vector.indices, 0, header.numel)
        return vector


def _check(indices: Tensor, values: Tensor, numel: int) -> None:
    for what, given in (("indices", indices), ("values", values)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{what} is {type(given).__name__}, expected a tensor")
    if indices.dtype != torch.int32:
        raise TypeError(f"indices are {indices.dtype}, expected torch.int32: use indices.to(torch.int32)")
    if values.dtype not in WIRE_DTYPES:
        raise TypeError(f"values are {values.dtype}, expected one of {list(WIRE_DTYPES)}")
    if indices.dim() != 1 or indices.shape != values.shape:
        raise ValueError(
            f"indices {tuple(indices.shape)} and values {tuple(values.shape)} given, expected 1-D and equally long"
        )
    if indices.device != values.device:
        raise ValueError(f"indices on {indices.device} but values on {values.device}: move one of them")
    check_indices(indices, 0, numel)
