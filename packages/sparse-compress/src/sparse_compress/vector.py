"""Sparse vector that always lives in its own wire form: a header of 32 bytes, the values, then the int32 indices.

    byte 0        16      24      28           32           32 + 4k (float64: 8k)
    ├─ free ──────┼─ numel ┼─ entries ┼─ dtype code ┼─ values … ┼─ indices … ┤

The free half of the header is for a transport, which stamps call and round there. Values come before the indices so
that float64 stays aligned to 8 bytes. All integers are in the byte order of the machine.
"""

from ctypes import memmove
from struct import Struct
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sparse_compress.arguments import MAX_NUMEL, WIRE_DTYPES, check_bytes, element_count
from sparse_compress.native.library import kernels

HEADER_BYTES = 32
"""Header of a packed vector: the free half, then numel, entries and dtype."""
FREE_BYTES = 16
"""First bytes of a packed vector, for a transport's own stamp."""
INDEX_BYTES = 4
_WORDS = Struct("=2q")  # of the header's second half: numel; entries and the dtype's code
_CODES = {torch.float32: 1, torch.float64: 2}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


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

    def __init__(self, indices: Tensor, values: Tensor, numel: int) -> None:
        numel = element_count(numel)
        _check(indices, values, numel)
        dtype = WIRE_DTYPES[values.dtype]
        buffer = torch.empty(wire_nbytes(len(indices), dtype), dtype=torch.uint8, device=values.device)
        self._set(buffer, len(indices), numel, dtype)
        self.indices.copy_(indices)
        self.values.copy_(values.detach())

    def _set(self, buffer: Tensor, entries: int, numel: int, dtype: torch.dtype, *, unwritten: bool = True) -> None:
        self._buffer, self._entries, self.numel, self.dtype = buffer, entries, numel, dtype
        self.device, self.is_cpu = buffer.device, buffer.is_cpu
        self._unwritten, self._indices, self._values = unwritten, None, None

    @classmethod
    def allocate(cls, entries: int, numel: int, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Allocates a vector in a new buffer; the caller fills in indices and values. Arguments are trusted.

        Args:
            entries: Number of entries, k.
            numel: Elements of the whole vector.
            dtype: float32 or float64.
            device: Device of the buffer.
        """
        self = cls.__new__(cls)
        nbytes = HEADER_BYTES + entries * (dtype.itemsize + INDEX_BYTES)
        self._set(torch.empty(nbytes, dtype=torch.uint8, device=device), entries, numel, dtype)
        return self

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype = torch.float32, *, device: torch.device | str | None = None) -> Self:
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
        return cls.allocate(
            0, element_count(numel), WIRE_DTYPES[dtype], torch.get_default_device() if device is None else device
        )

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
    def addresses(self) -> tuple[int, int]:
        """Addresses of the first index and the first value, on a CPU."""
        values = self._buffer.data_ptr() + HEADER_BYTES
        return values + self._entries * self.dtype.itemsize, values

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

    def __repr__(self) -> str:
        return f"SparseVector(entries={len(self)}, numel={self.numel}, dtype={self.dtype}, device={self.device})"

    def clone(self) -> Self:
        """Copy in memory of its own."""
        copy = self.allocate(self._entries, self.numel, self.dtype, self.device)
        if self.is_cpu:  # by the C library: a third of what torch takes for some thousands
            memmove(copy.addresses[1], self.addresses[1], self.nbytes - HEADER_BYTES)
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
            ValueError: ``out`` is of another size, dtype or device, or not contiguous.
        """
        if (out.numel(), out.dtype, out.device) != (self.numel, self.dtype, self.device) or not out.is_contiguous():
            raise ValueError(
                f"{self} cannot be put into {out.dtype}, {tuple(out.shape)} on {out.device}: expected a contiguous "
                "tensor of its numel, dtype and device"
            )
        return put(out, self.indices, self.values, divisor=divisor)

    def pack(self) -> Tensor:
        """Wire form, 1-D uint8: this vector's own memory, not a copy."""
        if self._unwritten:
            write_header(self._buffer, self.numel, self._entries, self.dtype)
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
        if buffer.numel() < HEADER_BYTES:
            raise ValueError(f"{buffer.numel()} bytes given, but the header alone has {HEADER_BYTES}")
        if buffer.data_ptr() % 8 or buffer.storage_offset() % 8:
            buffer = buffer.clone()
        if like is not None and not buffer.is_cpu:
            entries, rest = divmod(buffer.numel() - HEADER_BYTES, like.dtype.itemsize + INDEX_BYTES)
            if rest:
                raise ValueError(f"{buffer.numel()} bytes are no whole number of {like.dtype} entries")
            numel, dtype = like.numel, like.dtype
        else:
            numel, entries, dtype = read_header(buffer[FREE_BYTES:HEADER_BYTES])
            if buffer.numel() != wire_nbytes(entries, dtype):
                raise ValueError(
                    f"corrupted header or cut message: {buffer.numel()} bytes given, "
                    f"but {entries} {dtype} entries take {wire_nbytes(entries, dtype)}"
                )
            if like is not None and (numel, dtype) != (like.numel, like.dtype):
                raise ValueError(
                    f"the message holds {numel} elements of {dtype}, expected {like.numel} of {like.dtype}"
                )
        vector = cls.__new__(cls)
        vector._set(buffer, entries, numel, dtype, unwritten=False)
        if buffer.is_cpu:
            check_entries(vector, 0, numel)
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


def check_entries(sparse: SparseVector, low: int, high: int) -> None:
    """Checks a vector like `check_indices`, without making a tensor of its indices where they are right."""
    library = kernels() if sparse.is_cpu else None
    if library is None or not library.sc_increasing(sparse.addresses[0], len(sparse), low, high):
        check_indices(sparse.indices, low, high)


def check_indices(indices: Tensor, low: int, high: int) -> None:
    """Raises ValueError unless ``indices``, 1-D int32, increase strictly from ``low`` on, and stay below ``high``.

    It takes one pass on a CPU; from a GPU two answers are read back.
    """
    if not len(indices):
        return
    given = indices.numpy() if indices.is_cpu else indices
    if not is_increasing(indices):
        raise ValueError("indices are not strictly increasing: sort them, and add up the values of equal ones")
    first, last = int(given[0]), int(given[-1])
    if first < low or last >= high:
        raise ValueError(f"indices run from {first} to {last}, expected {low} … {high - 1}")


def is_increasing(indices: Tensor) -> bool:
    """Whether ``indices``, 1-D int32, increase strictly; from a GPU the answer is read back."""
    if kernels(indices, (torch.int32,)):
        return bool(kernels().sc_increasing(indices.data_ptr(), indices.numel(), -MAX_NUMEL - 1, MAX_NUMEL + 1))
    given = indices.numpy() if indices.is_cpu else indices
    return bool((given[1:] > given[:-1]).all())


def put(out: Tensor, indices: Tensor, values: Tensor, *, divisor: float = 1.0) -> Tensor:
    """Puts out ← 0, and values / divisor at the indices; returns ``out``. All is trusted.

    Args:
        out: Contiguous, of the values' dtype and device.
        indices: int32, (k,), increasing, within ``out`` flattened.
        values: (k,).
        divisor: Divisor of all values, such as the number of ranks for their mean.
    """
    if kernels(out):
        given = indices.data_ptr(), values.data_ptr(), indices.numel()
        kernels().sc_put(out.data_ptr(), out.numel(), *given, divisor)
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


class Header(NamedTuple):
    """Contents of the header; ``numel`` and ``entries`` count elements."""

    numel: int
    entries: int
    dtype: torch.dtype


def write_header(buffer: Tensor, numel: int, entries: int, dtype: torch.dtype) -> None:
    """Fills the first 32 bytes of a uint8 ``buffer``, the free ones with 0; no host synchronisation on a GPU."""
    sizes = entries | _CODES[dtype] << 32
    if buffer.is_cpu:
        data = buffer.numpy().data
        data[:FREE_BYTES] = bytes(FREE_BYTES)
        _WORDS.pack_into(data, FREE_BYTES, numel, sizes)
        return
    words = buffer[:HEADER_BYTES].view(torch.int64)
    words[:2] = 0
    words[2] = numel
    words[3] = sizes


def read_header(own: Tensor) -> Header:
    """Reads back and checks the header's second half, 16 bytes of uint8; a GPU is waited for.

    Raises:
        ValueError: The header contradicts itself.
    """
    numel, word = _WORDS.unpack(own.cpu().numpy().data)
    entries, code = word & 0xFFFFFFFF, word >> 32
    if code not in _DTYPES:
        raise ValueError(f"corrupted header: dtype code {code}, expected one of {_DTYPES}")
    if not 0 <= entries <= numel <= MAX_NUMEL:
        raise ValueError(f"corrupted header: {entries} entries of {numel} elements (at most {MAX_NUMEL})")
    return Header(numel, entries, _DTYPES[code])
