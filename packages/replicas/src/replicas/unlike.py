"""Check that ranks still hold the same: one small number a tensor is compared, not its elements."""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from communicators import CollectiveError, Schedule, allgather, as_communicator, run, schedules
from torch import Tensor

CHUNK_BYTES = 1 << 21
_FACTORS = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1, 0x165667B19E3779F9)  # odd, of xxHash


def refuse_unlike(named: Mapping[str, Tensor], comm: Any, *, when: str = "", ranks: Sequence[int] | None = None) -> int:
    """Hash of the tensors where all ranks hold the same bits, and an error where not; for every rank to call.

        refuse_unlike(dict(model.named_parameters()), comm, when="after step 100")

    One pass over the tensors, and ⌈log P⌉ messages of 8 bytes a rank; where ranks differ, 8 bytes a tensor more. Bits
    are compared, so 0.0 and −0.0 differ, and NaNs of the same bits do not.

    Args:
        named: Tensors by name; names, shapes and dtypes are the same on every rank.
        comm: See `communicators.as_communicator`.
        when: Point of the training, for the error.
        ranks: Numbers by which the error names the ranks of `comm`; default: those that they have there.

    Returns:
        Hash of all tensors in 64 bits, see `hash_bits`, signed.

    Raises:
        CollectiveError: The same on every rank: names the ranks that differ from the majority, and for each its first
            tensor that does; of a tensor without a majority, as among two ranks, every rank's hash.
    """
    comm = as_communicator(comm)
    mine = [hash_bits(tensor).cpu() for tensor in named.values()]
    own = torch.stack(mine) if mine else torch.zeros(0, dtype=torch.int64, device="cpu")
    listed = ";".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in named.items())
    facts = f"refuse_unlike({len(named)} tensors, names and shapes {zlib.crc32(listed.encode()):08x})"
    digests = run(_gathered(hash_bits(own), comm.rank, comm.size), comm, facts=facts, device=torch.device("cpu"))
    if len(set(digests)) == 1:
        return digests[0]
    hashes = torch.stack(allgather(own, comm))  # P × tensors
    raise CollectiveError(_report(hashes.tolist(), list(named), when, ranks or range(comm.size)))


def hash_bits(tensor: Tensor) -> Tensor:
    """Hash of a tensor's bits and their places, in 64 bits; NaNs count as the bits that they are.

        h ← Σ mix(word + place) over each chunk of 64-bit words, chunks joined by h ← f·h + chunk, modulo 2⁶⁴

    The last word is filled up with zeros. The same on every device. Not meant to withstand somebody who wants a
    collision.

    Args:
        tensor: Tensor of any shape and dtype.

    Returns:
        int64, 0-D, on the tensor's device.
    """
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    places = torch.arange(min(CHUNK_BYTES // 8, -(-data.numel() // 8)), device=data.device) * _FACTORS[0]
    for chunk in torch.split(data, CHUNK_BYTES):
        words = _words(chunk)
        total = total * _FACTORS[1] + _mixed(words + places[: words.numel()]).sum()
    return total


def _words(chunk: Tensor) -> Tensor:
    """Words of a chunk as int64, filled up with zero bytes."""
    if rest := -chunk.numel() % 8:
        chunk = torch.cat([chunk, chunk.new_zeros(rest)])
    elif chunk.storage_offset() % 8:
        chunk = chunk.clone()
    return chunk.view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    """Mixes every bit of a word into every bit of the result, so that sums tell apart what plain sums do not."""
    for factor in _FACTORS[1:]:
        words = words ^ (words >> 32)
        words = words * factor
    return words ^ (words >> 29)


def _gathered(digest: Tensor, rank: int, size: int) -> Schedule[list[int]]:
    own = digest.view(1).view(torch.uint8)
    blocks = yield from schedules.allgather_blocks(own, [own.numel()] * size, rank, size)
    return [int(block.clone().view(torch.int64)) for block in blocks]


def _report(hashes: Sequence[Sequence[int]], names: Sequence[str], when: str, ranks: Sequence[int]) -> str:
    minority: dict[int, list[str]] = {}  # names of tensors by rank
    undecided: list[tuple[str, Sequence[int]]] = []
    for name, column in zip(names, zip(*hashes, strict=True), strict=True):
        value, votes = Counter(column).most_common(1)[0]
        if 2 * votes <= len(column):
            undecided.append((name, column))
            continue
        for rank in (rank for rank, held in zip(ranks, column, strict=True) if held != value):
            minority.setdefault(rank, []).append(name)
    told = [f"rank {rank} in {_first_of(found)}" for rank, found in sorted(minority.items())]
    told = [f"{', '.join(told)}, against most of the {len(hashes)} ranks"] if told else []
    if undecided:
        name = _first_of([name for name, _ in undecided])
        held = ", ".join(
            f"{value % 2**64:016x} on rank {rank}" for rank, value in zip(ranks, undecided[0][1], strict=True)
        )
        told.append(f"hashes of {name} are {held}, and without a majority nobody knows which is right")
    return (
        f"replicas differ{when and f' {when}'}: {'; '.join(told)}; of {len(names)} tensors. Bits were flipped in "
        "memory, or something changed them on some ranks only, such as a step, a load or an initialisation that the "
        "others did not make alike: go on from a checkpoint before, and leave out a machine that is named again"
    )


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")
