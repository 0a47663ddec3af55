"""Wire form of a sparse vector: a header of 32 bytes, then the values, then the int32 indices.

    byte 0        16      24      28           32           32 + 4k (float64: 8k)
    ├─ slot ──────┼─ numel ┼─ entries ┼─ dtype code ┼─ values … ┼─ indices … ┤

The slot belongs to the transport, which stamps call and round there. Values come before the indices so
that float64 stays aligned to 8 bytes. All integers are in the byte order of the machine.
"""

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 32
"""Header of a packed vector: 16 free bytes for a transport's own stamp, then numel, entries and dtype."""
OWN_HEADER_BYTES = 16
"""The header without its free half."""
INDEX_BYTES = 4
MAX_NUMEL = 2**31 - 1
"""Most elements of a vector: the limit of an int32 index, and of an int32 count of entries."""

WIRE_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
_WORDS = Struct("=4q")  # of a header: two for the slot, numel, sizes
_CODES = {torch.float32: 1, torch.float64: 2}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ENTRY_NBYTES = {dtype: wide.itemsize + INDEX_BYTES for dtype, wide in WIRE_DTYPES.items()}


class Header(NamedTuple):
    """Contents of the vector's own half of the header; ``numel`` and ``entries`` count elements."""

    numel: int
    entries: int
    dtype: torch.dtype


def entry_nbytes(dtype: torch.dtype) -> int:
    """Bytes of one entry on the wire: 8 for gradients of up to 32 bits, 12 for float64."""
    return _ENTRY_NBYTES[dtype]


def wire_nbytes(entries: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a packed vector, header included: the capacity a receive needs.

    Args:
        entries: Number of entries.
        dtype: The gradient's; float16 and bfloat16 travel as float32.
    """
    return HEADER_BYTES + entries * _ENTRY_NBYTES[dtype]


def write_header(buffer: Tensor, header: Header) -> None:
    """Fills the first 32 bytes of a uint8 ``buffer``, with an empty slot; no host synchronisation on a GPU."""
    sizes = header.entries | _CODES[header.dtype] << 32
    if buffer.is_cpu:
        _WORDS.pack_into(buffer.numpy().data, 0, 0, 0, header.numel, sizes)
        return
    words = buffer[:HEADER_BYTES].view(torch.int64)
    words[:2] = 0
    words[2] = header.numel
    words[3] = sizes


def read_header(buffer: Tensor) -> Header:
    """Reads back and checks the header of a uint8 ``buffer`` of at least 32 bytes; on a GPU this waits for the device.

    Raises:
        ValueError: The header contradicts itself or the length of the buffer.
    """
    on_cpu = buffer if buffer.is_cpu else buffer[:HEADER_BYTES].cpu()
    _, _, numel, word = _WORDS.unpack_from(on_cpu.numpy().data)
    entries, code = word & 0xFFFFFFFF, word >> 32
    if code not in _DTYPES:
        raise ValueError(f"corrupted header: dtype code {code}, expected one of {_DTYPES}")
    if not 0 <= entries <= numel <= MAX_NUMEL:
        raise ValueError(f"corrupted header: {entries} entries of {numel} elements (at most {MAX_NUMEL})")
    expected = wire_nbytes(entries, _DTYPES[code])
    if buffer.numel() != expected:
        raise ValueError(
            f"corrupted header or cut message: {buffer.numel()} bytes given, "
            f"but {entries} {_DTYPES[code]} entries take {expected}"
        )
    return Header(numel, entries, _DTYPES[code])
