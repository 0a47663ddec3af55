"""What a distributed optimizer adds to a checkpoint: residuals and velocities by parameter, one state a rank.

By parameter, not by bucket, so that a checkpoint outlives another `bucket_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from communicators import Bucket
from torch import Tensor

KEY = "distributed"
"""Where a distributed optimizer's state_dict has this part; the rest is the wrapped optimizer's."""

PARTS = ("residuals", "velocities")


def check_place(state: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
    """This part of a state_dict; ValueError unless it is of this rank and this world size."""
    if KEY not in state:
        raise ValueError(
            f"a state with the keys {sorted(state)} given, expected one of a DistributedOptimizer, with {KEY!r}; "
            "give a plain optimizer's state to the wrapped optimizer"
        )
    own: Mapping[str, Any] = state[KEY]
    if own["world_size"] != size:
        raise ValueError(
            f"the state is of {own['world_size']} ranks, but there are {size} now: "
            "carry the residuals over, or drop them, with reshard_residuals"
        )
    if own["rank"] != rank:
        raise ValueError(f"the state of rank {own['rank']} given to rank {rank}: every rank saves and loads its own")
    return own


def refuse_residuals(residuals: Mapping[str, Tensor]) -> None:
    """Raises ValueError for residuals that are not zero: a dense sum would lose them."""
    if any(bool(residual.any()) for residual in residuals.values()):
        raise ValueError(
            "the state holds residuals, which a dense exchange has no use for: "
            "drop them with reshard_residuals(states, size, drop=True)"
        )


def split(flats: Mapping[str, Tensor], buckets: Mapping[str, Bucket], names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors by parameter, as views of those by bucket; names are those of the buckets' members."""
    return {
        names[member]: view
        for key, flat in flats.items()
        for member, view in zip(buckets[key].members, buckets[key].views(flat), strict=True)
    }


def join(
    tensors: Mapping[str, Tensor], buckets: Mapping[str, Bucket], names: Sequence[str], what: str
) -> dict[str, Tensor]:
    """Tensors by bucket out of those by parameter; none at all stays none.

    Raises ValueError that names the parameters that do not fit.
    """
    if not tensors:
        return {}
    shapes = {
        names[member]: shape
        for bucket in buckets.values()
        for member, shape in zip(bucket.members, bucket.shapes, strict=True)
    }
    wrong = sorted(set(shapes) ^ set(tensors))
    if wrong:
        raise ValueError(f"{what}: only the checkpoint, or only the model, has {wrong}")
    wrong = [
        f"{name}: {tuple(tensors[name].shape)}, not {tuple(s)}"
        for name, s in shapes.items()
        if tensors[name].shape != s
    ]
    if wrong:
        raise ValueError(f"{what} of other shapes than the parameters: {wrong}")
    ordered = [tensors.get(name) for name in names]
    return {key: bucket.gather(ordered, out=_like(bucket)) for key, bucket in buckets.items()}


def reshard_residuals(states: Sequence[Mapping[str, Any]], size: int, *, drop: bool = False) -> list[dict[str, Any]]:
    """States for `size` ranks out of those of all P ranks before, so that training goes on with another world size.

        states = [torch.load(f"rank{r}.pt") for r in range(4)]
        optimizer.load_state_dict(reshard_residuals(states, size=2)[rank])

    states: `DistributedOptimizer.state_dict()` of ranks 0 … P − 1, in order.
    Residuals and velocities of old rank r go to rank r mod size, times size/P because updates are means over ranks:
    what is still to be applied stays the same. With `drop` all of them start at zero instead. The wrapped optimizer's
    state, which is the same on all ranks, goes to every rank; what an algorithm learnt about P ranks is forgotten.
    Nothing is written to `states`.
    Raises ValueError where states are missing, or of several runs.
    """
    owns = [state[KEY] for state in states]
    places = [(own["rank"], own["world_size"]) for own in owns]
    if size < 1 or not owns or places != [(rank, len(states)) for rank in range(len(states))]:
        raise ValueError(
            f"size={size} and states of (rank, world size) {places} given, expected size of 1 or more, "
            "and the states of all ranks of one run in rank order"
        )
    return [{**states[0], KEY: _reshard(owns, rank, size, drop=drop)} for rank in range(size)]


def _reshard(owns: Sequence[Mapping[str, Any]], rank: int, size: int, *, drop: bool) -> dict[str, Any]:
    heirs = [] if drop else owns[rank::size]
    parts = {part: {name: _total(name, part, owns, heirs, size) for name in owns[0][part]} for part in PARTS}
    return {**owns[0], **parts, "rank": rank, "world_size": size, "algorithm_state": {}}


def _total(
    name: str, part: str, owns: Sequence[Mapping[str, Any]], heirs: Sequence[Mapping[str, Any]], size: int
) -> Tensor:
    total = torch.zeros_like(owns[0][part][name])
    for heir in heirs:
        total += heir[part][name]
    return total.mul_(size).div_(len(owns))


def _like(bucket: Bucket) -> Tensor:
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    return torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
