"""Sparse vectors in fewer bytes."""

from math import lgamma, log

import torch
from torch import Tensor

from sparse_compress.arguments import element_count, integer
from sparse_compress.codecs import elias_fano
from sparse_compress.codecs.rounding import VALUES, aligned, leftover
from sparse_compress.vector import CODES, FREE_BYTES, HEADER_BYTES, WORDS, SparseVector, check_entries


class WireCodec:
    """Wire form of sparse vectors with fewer bytes for values, for indices, or for both.

        codec = WireCodec(values="bf16", indices="packed")
        rounded, error = codec.split(vector)     # rounded + error = vector, exactly
        message = codec.encode(rounded)          # loses nothing more: decode(message) is rounded, bit for bit
        feedback.restore(name, error)            # one residual keeps it

    The sender computes with ``rounded`` too, so that both sides hold the same bits.

    Sizes follow from numel and the number of entries, packed indices' too (``elias_fano``), so a receiver needs no
    round of sizes: ``nbytes``. The first 32 bytes are a header as in ``vector``, whose code names the codec too.
    Nothing is read back from a GPU.

    Args:
        values: "fp32", "bf16", "fp16" or "int8"; the vectors themselves are float32.
        indices: "raw" (int32) or "packed" (Elias–Fano).

    Raises:
        ValueError: Another name.
    """

    def __init__(self, values: str = "bf16", indices: str = "packed") -> None:
        if values not in list(VALUES) or indices not in ("raw", "packed"):
            known = f"values of {list(VALUES)} and indices 'raw' or 'packed'"
            raise ValueError(f"values={values!r}, indices={indices!r} given, expected {known}")
        self.values, self.indices = values, indices
        self._code = CODES[torch.float32] | list(VALUES).index(values) << 8 | (indices == "packed") << 16

    def nbytes(self, entries: int, numel: int) -> int:
        """Bytes of a message, header included, a multiple of 4.

        Args:
            entries: Number of entries.
            numel: Elements of the whole vector.
        """
        return HEADER_BYTES + self._sizes(entries, numel)[-1]

    def split(self, vector: SparseVector) -> tuple[SparseVector, SparseVector]:
        """Splits a float32 vector into the values that ``encode`` keeps, and the rounding error, entry by entry.

        Returns:
            (rounded, error) with the vector's indices; rounded + error = vector, exactly; NaN and inf have error 0.

        Raises:
            TypeError: The vector is float64.
        """
        kind, values, rounded, error = VALUES[self.values], _float32(vector), vector.clone(), vector.clone()
        kind.unpack(kind.pack(values), rounded.values)
        leftover(values, rounded.values, error.values)
        return rounded, error

    def encode(self, vector: SparseVector) -> Tensor:
        """Encodes a vector as a message: uint8, (nbytes,).

        Args:
            vector: float32.

        Raises:
            TypeError: The vector is float64.
        """
        values, indices = VALUES[self.values].pack(_float32(vector)), vector.indices.view(torch.uint8)
        if self.indices == "packed":
            indices = elias_fano.pack(vector.indices, vector.numel)
        zeros, header = values.new_zeros(FREE_BYTES), vector.pack()[FREE_BYTES:HEADER_BYTES]
        message = torch.cat([zeros, header, values, zeros[: -len(values) % 4], indices, zeros[: -len(indices) % 4]])
        message[HEADER_BYTES - 8 : HEADER_BYTES].view(torch.int64).fill_(len(vector) | self._code << 32)
        return message

    def decode(self, message: Tensor, numel: int, entries: int | None = None) -> SparseVector:
        """Decodes the vector of a message, in memory of its own.

        Args:
            message: uint8, 1-D.
            numel: Elements of the whole vector.
            entries: Number of entries; by default it is read from the header, for which a GPU is waited for.

        Raises:
            TypeError: The message is no uint8 tensor.
            ValueError: The length does not fit, or on a CPU the header does not, such as that of another codec, or the
                indices do not increase strictly within numel. On a GPU they are trusted, because reading them would
                wait for it.
        """
        return self.decode_block(message[FREE_BYTES:], numel, entries)

    def block_nbytes(self, entries: int, numel: int) -> int:
        """Bytes of a message without the free half of its header.

        Args:
            entries: Number of entries.
            numel: Elements of the whole vector.
        """
        return self.nbytes(entries, numel) - FREE_BYTES

    def encode_block(self, vector: SparseVector) -> Tensor:
        """Encodes a vector as a message without the free half of its header, as when several are sent in one.

        Args:
            vector: float32.

        Raises:
            TypeError: As ``encode``.
        """
        return self.encode(vector)[FREE_BYTES:]

    def decode_block(self, block: Tensor, numel: int, entries: int | None = None) -> SparseVector:
        """Decodes what ``encode_block`` has made.

        Args:
            block: uint8, 1-D.
            numel: Elements of the whole vector.
            entries: As in ``decode``.

        Raises:
            TypeError: As ``decode``.
            ValueError: As ``decode``.
        """
        block, numel, header = aligned(block), element_count(numel), HEADER_BYTES - FREE_BYTES
        if block.numel() < header:
            raise ValueError(f"{FREE_BYTES + block.numel()} bytes given, but the header alone takes {HEADER_BYTES}")
        entries = self._entries(block[:header], numel, entries)
        indices_at, total = self._sizes(entries, numel)
        if block.numel() != header + total:
            nbytes = FREE_BYTES + block.numel()
            raise ValueError(f"{nbytes} bytes given, but {entries} entries of {numel} take {HEADER_BYTES + total}")
        vector = SparseVector.allocate(entries, numel, torch.float32, block.device)
        VALUES[self.values].unpack(block[header:], vector.values)
        data = block[header + indices_at :]
        if self.indices == "raw":
            vector.indices.copy_(data[: 4 * entries].view(torch.int32))
        else:
            elias_fano.unpack(data[: elias_fano.nbytes(numel, entries)], numel, vector.indices)
        if block.is_cpu:
            check_entries(vector, 0, numel)
        return vector

    def _sizes(self, entries: int, numel: int) -> tuple[int, int]:
        """Bytes after the header: of the values, with padding to 4, after which the indices start; of both likewise."""
        values = VALUES[self.values].nbytes(entries)
        indices_at = values + -values % 4
        indices = elias_fano.nbytes(numel, entries) if self.indices == "packed" else 4 * entries
        return indices_at, indices_at + indices + -indices % 4

    def _entries(self, header: Tensor, numel: int, expected: int | None) -> int:
        """Number of entries, which a header names; on a GPU the expected one, because reading would wait for it."""
        said, entries, code = numel, expected, self._code
        if expected is None or header.is_cpu:
            said, word = WORDS.unpack(header.cpu().numpy().data)
            entries, code = word & 0xFFFFFFFF, word >> 32
        count = integer(entries if expected is None else expected, "entries", expected="their number")
        if count > numel:
            raise ValueError(f"{count} entries of {numel} elements, expected 0 … {numel}")
        if (said, entries) != (numel, count):
            raise ValueError(f"the message holds {entries} entries of {said} elements, expected {count} of {numel}")
        if code != self._code:
            raise ValueError(f"a message of another codec than {self}, or damaged: code {code:#x}, not {self._code:#x}")
        return count

    def __repr__(self) -> str:
        return f"WireCodec(values={self.values!r}, indices={self.indices!r})"


def index_entropy(entries: int, numel: int) -> float:
    """Entropy bound of the indices, in bytes an entry: log₂ of the number of choices; no code is shorter for all.

    Args:
        entries: Number of chosen indices, at least 1.
        numel: Number of elements to choose from.
    """
    nats = lgamma(numel + 1) - lgamma(entries + 1) - lgamma(numel - entries + 1)
    return nats / log(2) / 8 / entries


def _float32(vector: SparseVector) -> Tensor:
    if vector.dtype != torch.float32:
        raise TypeError(f"{vector} given, expected float32 values: float64 travels by pack()")
    return vector.values
