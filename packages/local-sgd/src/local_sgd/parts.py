"""Parameters as a few flat vectors, in which the algorithms compute."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from communicators import buckets_of
from replicas import hash_bits, is_dense
from torch import Tensor

from local_sgd.rule import Part


def parts_of(
    groups: Sequence[Mapping[str, object]], named: Mapping[str, Tensor], nbytes: int | None, device: torch.device | None
) -> list[Part]:
    """Cuts the named parameters into parts of at most `nbytes` each; a larger tensor is a part by itself.

    device: where vectors live, default the parameters'.
    """
    names, parts = {id(p): name for name, p in named.items()}, []
    for position, group in enumerate(groups):
        members = [p for p in group["params"] if id(p) in names]  # type: ignore[attr-defined]
        for bucket in buckets_of(members, nbytes):
            tensors = [members[m] for m in bucket.members]
            dtype, where = torch.promote_types(bucket.dtype, torch.float32), device or bucket.device
            flat = replace(bucket, members=tuple(range(len(tensors))), dtype=dtype, device=where)
            rounded = None if dtype == bucket.dtype else torch.zeros(flat.numel, dtype=dtype, device=where)
            parts.append(Part([names[id(p)] for p in tensors], tensors, flat, position, remainder=rounded))
    return parts


def by_name(parts: Sequence[Part], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    """Views of vectors, one for each part, by parameter."""
    return {name: view for part, flat in zip(parts, flats, strict=True) for name, view in part.by_name(flat).items()}


def refuse_other_shapes(what: str, tensors: Mapping[str, Tensor], parts: Sequence[Part]) -> None:
    """Raises ValueError for saved tensors that are not one for each parameter, in its shape."""
    if no := [name for name, held in tensors.items() if not (is_dense(held) and held.is_floating_point())]:
        raise ValueError(f"{what}: {no} of the state are no dense floating-point tensors: it was damaged")
    saved = {(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    own = {(name, tuple(p.shape)) for part in parts for name, p in zip(part.names, part.tensors, strict=True)}
    if wrong := sorted(saved ^ own):
        raise ValueError(f"{what}: only the checkpoint, or only the model, has (name, shape) {wrong}")


def digest(named: Mapping[str, Tensor]) -> int:
    """Hash of all bits of the parameters, in the order of their names."""
    return int(hash_bits(torch.stack([hash_bits(named[name]).cpu() for name in sorted(named)])))
