"""Sparse vector that always lives in its own wire form: a header of 32 bytes, the values, then the int32 indices.

    byte 0        16      24      28           32           32 + 4k (float64: 8k)
    ├─ free ──────┼─ numel ┼─ entries ┼─ dtype code ┼─ values … ┼─ indices … ┤

The free half of the header is for a transport, which stamps call and round there. Values come before the indices so
that float64 stays aligned to 8 bytes. All integers are in the byte order of the machine.
"""

from ctypes import memmove
from struct import Struct
from typing import Any, Self

import torch
from torch import Tensor

from sparse_compress.arguments import MAX_NUMEL, WIRE_DTYPES, check_bytes, element_count
from sparse_compress.native.library import kernels

HEADER_BYTES = 32
"""Header of a packed vector: the free half, then numel, entries and dtype."""
FREE_BYTES = 16
"""First bytes of a packed vector, for a transport's own stamp."""
INDEX_BYTES = 4
WORDS = Struct("=2q")  # of the header's second half: numel; entries and, above 32 bits, the dtype's code
CODES = {torch.float32: 1, torch.float64: 2}
DTYPES = {code: dtype for dtype, code in CODES.items()}
Device = torch.device | str | None


class SparseVector:
    """Vector of ``numel`` elements, all zero but for ``values`` at ``indices``.

        >>> SparseVector(torch.tensor([1, 4], dtype=torch.int32), torch.tensor([2.0, -3.0]), 6).to_dense()
        tensor([ 0.,  2.,  0.,  0., -3.,  0.])

    Both tensors are views into one uint8 buffer that has room for the header, so ``pack`` and
    ``unpack`` copy nothing. Treat a vector as immutable once it is packed.

    Args:
        indices: int32, (k,), strictly increasing, each in [0, numel). Checked, and copied.
        values: (k,), on the indices' device, copied: float32 or float64; float16 and bfloat16 become float32. Explicit
            zeros are entries like any other.
        numel: Elements of the whole vector, at most 2³¹ − 1.

    Raises:
        TypeError: An argument has another type or dtype.
        ValueError: Shapes, devices or the order do not fit, or an index is out of range.
    """

    __slots__ = ("_buffer", "_entries", "_indices", "_unwritten", "_values", "device", "dtype", "is_cpu", "numel")

    numel: int
    dtype: torch.dtype
    """float32 or float64."""
    device: torch.device
    """Device of the buffer."""
    is_cpu: bool
    """Whether the buffer is on a CPU."""
    _entries: int
    _buffer: Tensor
    _indices: Tensor | None  # made at first use: many vectors are only passed on
    _values: Tensor | None
    _unwritten: bool  # whether the header is still missing from the buffer: most vectors never travel

    def __new__(cls, indices: Tensor, values: Tensor, numel: int) -> Self:
        numel = element_count(numel)
        _check(indices, values)
        vector = cls.allocate(len(indices), numel, WIRE_DTYPES[values.dtype], values.device)
        vector.indices.copy_(indices)
        vector.values.copy_(values.detach())
        check_entries(vector, 0, numel)
        return vector

    @classmethod
    def allocate(
        cls, entries: int, numel: int, dtype: torch.dtype, device: Device = None, packed: Tensor | None = None
    ) -> Self:
        """Allocates a vector in a new buffer; the caller fills in indices and values. Arguments are trusted.

        Args:
            entries: Number of entries, k.
            numel: Elements of the whole vector.
            dtype: float32 or float64.
            device: Device of the buffer; default: torch's default device.
            packed: Packed vector to take as the buffer.
        """
        vector = object.__new__(cls)
        vector._unwritten, vector._indices, vector._values = packed is None, None, None
        if packed is None:
            nbytes = HEADER_BYTES + entries * (dtype.itemsize + INDEX_BYTES)
            packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
        vector._buffer, vector._entries, vector.numel, vector.dtype = packed, entries, numel, dtype
        vector.device, vector.is_cpu = packed.device, packed.is_cpu
        return vector

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype = torch.float32, *, device: Device = None) -> Self:
        """Vector without entries.

        Args:
            numel: Elements of the whole vector.
            dtype: A gradient's; the vector has the dtype in which such values travel: float16 and bfloat16 as float32.
            device: Device of the vector; default: torch's default device.

        Raises:
            TypeError: Another dtype.
            ValueError: numel is negative, or more than 2³¹ − 1.
        """
        if dtype not in WIRE_DTYPES:
            raise TypeError(f"dtype {dtype} given, expected one of {list(WIRE_DTYPES)}")
        return cls.allocate(0, element_count(numel), WIRE_DTYPES[dtype], device)

    @property
    def indices(self) -> Tensor:
        """Indices of the entries: int32, (k,), strictly increasing."""
        if self._indices is None:
            self._indices = self._buffer[HEADER_BYTES + self._entries * self.dtype.itemsize :].view(torch.int32)
        return self._indices

    @property
    def values(self) -> Tensor:
        """Values of the entries: (k,), of ``dtype``."""
        if self._values is None:
            end = HEADER_BYTES + self._entries * self.dtype.itemsize
            self._values = self._buffer[HEADER_BYTES:end].view(self.dtype)
        return self._values

    @property
    def run(self) -> tuple[int, int, int]:
        """Addresses of the first index and the first value, and the number of entries: as kernels take them."""
        values = self._buffer.data_ptr() + HEADER_BYTES
        return values + self._entries * self.dtype.itemsize, values, self._entries

    @property
    def body(self) -> Tensor:
        """Body of the wire form, 1-D uint8: values, then indices."""
        return self._buffer[HEADER_BYTES:]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return self._buffer.numel()

    def __len__(self) -> int:
        return self._entries

    def __reduce__(self) -> tuple[Any, ...]:
        return unpacked, (self.pack(),)  # torch.save refuses two views of one memory in unlike dtypes

    def __repr__(self) -> str:
        return f"SparseVector(entries={len(self)}, numel={self.numel}, dtype={self.dtype}, device={self.device})"

    def clone(self) -> Self:
        """Copy in memory of its own."""
        copy = self.allocate(self._entries, self.numel, self.dtype, self.device)
        if self.is_cpu:  # by the C library: a third of what torch takes for some thousands
            memmove(copy.run[1], self.run[1], self.nbytes - HEADER_BYTES)
        else:
            copy.body.copy_(self.body)
        return copy

    def to_dense(self) -> Tensor:
        """Dense form, shape (numel,)."""
        return self.put(torch.empty(self.numel, dtype=self.dtype, device=self.device))

    def put(self, out: Tensor, *, divisor: float = 1.0) -> Tensor:
        """Overwrites ``out`` with the dense form divided by ``divisor``, and returns it.

        Args:
            out: numel elements of this dtype and device, of any shape; contiguous.
            divisor: Divisor of all values, such as the number of ranks for their mean.

        Raises:
            TypeError: ``out`` is no tensor.
            ValueError: ``out`` is of another size, dtype or device, or not contiguous.
        """
        if not isinstance(out, Tensor):
            raise TypeError(f"out is {type(out).__name__}, expected a tensor: torch.from_numpy(x) is one of x's memory")
        if (out.numel(), out.dtype, out.device) != (self.numel, self.dtype, self.device) or not out.is_contiguous():
            given = f"{out.dtype}, {tuple(out.shape)} on {out.device}"
            problem = f"{self} cannot be put into {given}: expected a contiguous tensor of its numel, dtype and device"
            raise ValueError(problem)
        return put(out, self.indices, self.values, divisor=divisor)

    def pack(self) -> Tensor:
        """Wire form, 1-D uint8: this vector's own memory, not a copy."""
        if self._unwritten:
            sizes = self._entries | CODES[self.dtype] << 32
            if self.is_cpu:
                data = self._buffer.numpy().data
                data[:FREE_BYTES] = bytes(FREE_BYTES)
                WORDS.pack_into(data, FREE_BYTES, self.numel, sizes)
            else:  # without waiting for it
                words = self._buffer[:HEADER_BYTES].view(torch.int64)
                words[:2], words[2], words[3] = 0, self.numel, sizes
            self._unwritten = False
        return self._buffer

    @classmethod
    def unpack(cls, buffer: Tensor, *, like: "SparseVector | None" = None) -> Self:
        """Unpacks the vector that ``pack`` put into ``buffer``, as views of it; only a misaligned slice is copied.

        On a CPU the header and the indices are read and checked, so that the result is a valid vector. Indices on a GPU
        are trusted, because reading them would wait for it.

        Args:
            buffer: uint8, 1-D, contiguous.
            like: A vector of the expected numel and dtype. With it nothing is read back from a GPU: the number of
                entries follows from the length of the buffer.

        Raises:
            TypeError: The buffer is no 1-D contiguous uint8 tensor.
            ValueError: The header is corrupted, or does not fit ``like``; or indices do not increase strictly within
                numel.
        """
        check_bytes(buffer)
        nbytes = buffer.numel()
        if nbytes < HEADER_BYTES:
            raise ValueError(f"{nbytes} bytes given, but the header alone has {HEADER_BYTES}")
        if buffer.data_ptr() % 8 or buffer.storage_offset() % 8:
            buffer = buffer.clone()
        if like is not None and not buffer.is_cpu:
            numel, dtype = like.numel, like.dtype
            entries, rest = divmod(nbytes - HEADER_BYTES, dtype.itemsize + INDEX_BYTES)
            if rest:
                raise ValueError(f"{nbytes} bytes are no whole number of {dtype} entries")
        else:
            numel, sizes = WORDS.unpack(buffer[FREE_BYTES:HEADER_BYTES].cpu().numpy().data)
            entries, code = sizes & 0xFFFFFFFF, sizes >> 32
            dtype = DTYPES.get(code, torch.float32)
            taken = HEADER_BYTES + entries * (dtype.itemsize + INDEX_BYTES)
            if code not in DTYPES or not entries <= numel <= MAX_NUMEL or nbytes != taken:
                raise ValueError(
                    f"corrupted header or cut message: {nbytes} bytes, but {entries} {dtype} entries take {taken}; "
                    f"{entries} entries of {numel} elements (at most {MAX_NUMEL}), dtype code {code} of {DTYPES}"
                )
            if like is not None and (numel, dtype) != (like.numel, like.dtype):
                raise ValueError(
                    f"the message holds {numel} elements of {dtype}, expected {like.numel} of {like.dtype}"
                )
        vector = cls.allocate(entries, numel, dtype, buffer.device, buffer)
        if buffer.is_cpu:
            check_entries(vector, 0, numel)
        return vector


def unpacked(buffer: Tensor) -> SparseVector:
    """Vector of a checkpoint: to `torch.load` with weights_only=True, give this function to `safe_globals`.

    Args:
        buffer: What `pack` gave.
    """
    return SparseVector.unpack(buffer)


def _check(indices: Tensor, values: Tensor) -> None:
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


def check_entries(sparse: SparseVector, low: int, high: int) -> None:
    """Raises ValueError unless indices increase strictly from ``low`` on, and stay below ``high``.

    It takes one pass on a CPU; from a GPU two answers are read back.
    """
    library, (address, _, entries) = kernels() if sparse.is_cpu else None, sparse.run
    if not entries or (library and library.sc_increasing(address, entries, low, high)):
        return
    given = sparse.indices.numpy() if sparse.is_cpu else sparse.indices
    if not bool((given[1:] > given[:-1]).all()):
        raise ValueError("indices are not strictly increasing: sort them, and add up the values of equal ones")
    first, last = int(given[0]), int(given[-1])
    if first < low or last >= high:
        raise ValueError(f"indices run from {first} to {last}, expected {low} … {high - 1}")


def put(out: Tensor, indices: Tensor, values: Tensor, *, divisor: float = 1.0) -> Tensor:
    """Puts out ← 0, and values / divisor at the indices; returns ``out``. All is trusted.

    Args:
        out: Contiguous, of the values' dtype and device.
        indices: int32, (k,), increasing, within ``out`` flattened.
        values: (k,).
        divisor: Divisor of all values, such as the number of ranks for their mean.
    """
    if library := kernels(out):
        entries = indices.data_ptr(), values.data_ptr(), indices.numel()
        library.sc_put(out.data_ptr(), out.numel(), *entries, divisor)
        return out
    out.view(-1).zero_().index_copy_(0, indices.long(), values if divisor == 1 else values / divisor)
    return out


def wire_nbytes(entries: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a packed vector, header included: the capacity a receive needs.

    Args:
        entries: Number of entries.
        dtype: The gradient's; float16 and bfloat16 travel as float32.
    """
    return HEADER_BYTES + entries * (WIRE_DTYPES[dtype].itemsize + INDEX_BYTES)
