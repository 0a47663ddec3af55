"""State that distributed training adds to a checkpoint: residuals and velocities by parameter, one state a rank.

They are stored by parameter, not by bucket, so that a checkpoint stays valid when buckets change.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from communicators import Communicator
from replicas import (
    STATE_KEY,
    check_like,
    check_loaded,
    check_saved_by,
    is_dense,
    saved_by,
    state_of_rank,
    states_of_ranks,
)
from sparse_compress import all_finite
from torch import Tensor

from data_parallel.adam_step_correction import without_looks
from data_parallel.lanes import ERROR_STATE

RESHARD = "a state of another number of ranks goes through reshard_residuals"  # a key of saved states: see `saved_by`
CARRY = (
    "give the states of all ranks, or the gathered one, to data_parallel.reshard_residuals(states, size), and "
    "each rank its own of the result"
)

OWNERS, NEEDS = "a DistributedOptimizer, a SparseHookState or an HsdpState", ("algorithm", "algorithm_state")

Shapes = Mapping[str, torch.Size]


def own_state(state: Mapping[str, Any], comm: Communicator) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """This rank's state, out of a gathered one too, and its own part. ValueError for another rank or world size."""
    state = state_of_rank(state, comm.rank, comm.size, advice=CARRY)
    own = check_saved_by(
        state,
        comm.rank,
        comm.size,
        of=OWNERS,
        needs=NEEDS,
        advice=CARRY,
        one_file="; where rank 0 alone writes, save what gathered_state_dict() gives on every rank",
    )
    own = _whole(own)
    plain = {"algorithm": "", "algorithm_state": [], "steps": 0, "skipped": 0, "buckets": [[""]]}
    plain |= {kind: {} for kind in ERROR_STATE}
    check_like(own, {key: like for key, like in plain.items() if key in own}, "")
    for kind in ERROR_STATE:
        for name, held in own[kind].items():
            if not (is_dense(held) and held.is_floating_point()):
                raise ValueError(f"{kind} of {name!r} are no dense floating-point tensor: the state was damaged")
    return state, own


def refuse_nonfinite(own: Mapping[str, Any]) -> None:
    """Raises ValueError, by name, for error state, whose shapes fit, that would make every later step fail."""
    for kind in ERROR_STATE:
        for name, held in own[kind].items():
            if not bool(all_finite(held)):
                raise ValueError(
                    f"the state's {kind} of {name!r} are not finite (NaN or inf), so no step could be taken with "
                    "it: load an earlier state, or drop them with reshard_residuals(states, size, drop=True)"
                )


def check_sent(own: Mapping[str, Any], sends: str) -> None:
    """Raises ValueError for residuals of updates where gradients are sent, or the other way round."""
    if (saved := own.get("sends", "gradients")) != sends:
        savers = {"gradients": "a DistributedOptimizer, SparseHookState or HsdpState", "updates": "an UpdateOptimizer"}
        raise ValueError(
            f"the residuals and moments of the state are of {saved}, and not of {sends}: load it into "
            f"{savers.get(saved, saved)}, or begin anew"
        )


def complete(
    kept: Mapping[str, Mapping[str, Tensor]], keeps: Sequence[str], trained: Iterable[tuple[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """All error state of every trained parameter, zeros where nothing is kept yet.

    So that a new state is a complete template: torch.distributed.checkpoint loads only what it finds there.
    """
    found = {kind: dict(kept[kind]) for kind in ERROR_STATE}
    for name, p in trained:
        for kind in keeps:
            if name not in found[kind]:
                dtype = torch.promote_types(p.dtype, torch.float32)
                found[kind][name] = torch.zeros(p.shape, dtype=dtype, device=p.device)
    return found


def check_fit(own: Mapping[str, Any], shapes: Shapes, *, frozen: Shapes | None = None) -> None:
    """Raises ValueError that names the parameters for error state of others than those of `shapes`; none is fine.

    frozen: of parameters that may have some, which wait until they are trained again.
    """
    possible = {**(frozen or {}), **shapes}
    for kind in ERROR_STATE:
        if not (tensors := own[kind]):
            continue
        _check_numbering(tensors, shapes)
        if wrong := sorted((set(shapes) - set(tensors)) | (set(tensors) - set(possible))):
            raise ValueError(f"{kind}: only the checkpoint, or only the model, has {wrong}")
        wrong = [
            f"{name}: {tuple(tensors[name].shape)}, not {tuple(shape)}"
            for name, shape in possible.items()
            if name in tensors and tensors[name].shape != shape
        ]
        if wrong:
            raise ValueError(f"{kind} of other shapes than the parameters: {wrong}")


def without(own: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """State without kinds of error state that nothing keeps. ValueError where they are not zero, and would be lost."""
    if lost := [kind for kind in kinds if any(bool(tensor.any()) for tensor in own[kind].values())]:
        raise ValueError(
            f"the state holds {lost[0]}, which a dense exchange has no use for: load it where it was saved, or drop "
            "them with reshard_residuals(states, size, drop=True)"
        )
    return {**own, **{kind: {} for kind in kinds}}


def reshard_residuals(
    states: Sequence[Mapping[str, Any]] | Mapping[str, Any], size: int, *, drop: bool = False
) -> list[dict[str, Any]]:
    """States for `size` ranks out of those of all P ranks before, so that training goes on with another world size.

        states = [torch.load(f"rank{r}.pt") for r in range(4)]
        optimizer.load_state_dict(reshard_residuals(states, size=2)[rank])

    Residuals and velocities of old rank r go to rank r mod size, times size/P because updates are means over ranks:
    what is still to be applied stays the same. The wrapped optimizer's state, which is the same on all ranks, goes to
    every rank (each `UpdateOptimizer` has its own, and all get their mean); what an algorithm learnt about P
    ranks is forgotten. A compressor's own state goes from old rank r mod P to new rank r.

    Args:
        states: `DistributedOptimizer.state_dict()` or `SparseHookState.state_dict()` of ranks 0 … P − 1, in order;
            or what `gathered_state_dict()` gave. Nothing is written to them.
        size: The new number of ranks.
        drop: Residuals and velocities all start at zero instead.

    Returns:
        One state for each new rank, in order.

    Raises:
        TypeError: It is one rank's state.
        ValueError: States are missing, of several runs, or of another kind of optimizer.
    """
    states = states_of_ranks(states) or states
    if isinstance(states, Mapping):
        raise TypeError("one rank's state given, expected those of all ranks in rank order, or a gathered one")
    if any(states_of_ranks(state) is not None for state in states):
        raise TypeError(
            "a gathered state of sparse_hsdp given: its residuals belong to places inside a node, so take one place's, "
            "reshard_residuals(state['distributed']['ranks'][place], nodes)[node]"
        )
    owns = [_whole(state.get(STATE_KEY, {})) for state in states]
    if lacking := [key for key in NEEDS if any(key not in own for own in owns)]:
        raise ValueError(
            f"states that lack {lacking} given, expected those of {OWNERS}: those of averaging optimizers and of "
            "EagerSGD are loaded on another number of ranks as their own load_state_dict says"
        )
    places = [(own["rank"], own["world_size"]) for own in owns]
    if size < 1 or not owns or places != [(rank, len(states)) for rank in range(len(states))]:
        raise ValueError(
            f"size={size} and states of (rank, world size) {places} given, expected size of 1 or more, "
            "and the states of all ranks of one run in rank order"
        )
    wrapped = states[0]
    if owns[0].get("sends") == "updates":  # then the moments are each rank's own
        held: list[Any] = [own.get("wrapped") for own in owns]
        kept = [check_loaded(state, names)["state"] for state, names in zip(states, held, strict=True)]
        wrapped = {**wrapped, "state": _mean_of_states(kept)}
        if all(isinstance(names, list) for names in held):
            owns = [{**own, "wrapped": sorted({name for names in held for name in names})} for own in owns]
    return [{**wrapped, STATE_KEY: _reshard(owns, rank, size, drop=drop)} for rank in range(size)]


def _reshard(owns: Sequence[Mapping[str, Any]], rank: int, size: int, *, drop: bool) -> dict[str, Any]:
    heirs = [] if drop else owns[rank::size]
    error_state: dict[str, dict[str, Tensor]] = {kind: {} for kind in ERROR_STATE}
    for kind, totals in error_state.items():
        for name, first in owns[0][kind].items():
            totals[name] = torch.zeros_like(first)
            for heir in heirs:
                totals[name] += heir[kind][name]
            totals[name].mul_(size).div_(len(owns))
    of_the_world = saved_by(rank, size, RESHARD)
    rest = {key: value for key, value in owns[rank % len(owns)].items() if key not in of_the_world}
    return {**of_the_world, **without_looks(rest), **error_state, "algorithm_state": []}


def _whole(own: Mapping[str, Any]) -> dict[str, Any]:
    """State with its empty kinds of error state, which torch.distributed.checkpoint does not write."""
    return {**{kind: {} for kind in ERROR_STATE}, **own}


def _check_numbering(tensors: Mapping[str, Tensor], shapes: Shapes) -> None:
    saved, here = (all(re.fullmatch(r"parameter \d+", name) for name in names) for names in (tensors, shapes))
    if saved and not here:
        raise ValueError(
            "the state was saved without named_parameters, so it numbers parameters in the order in which DDP brought "
            "them: load it into a new SparseHookState without named_parameters, or drop its residuals"
        )
    if here and not saved:
        raise ValueError(
            "the state was saved with named_parameters: give this SparseHookState "
            "named_parameters=model.named_parameters() too"
        )


def _mean_of_states(states: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """The wrapped optimizers' state by parameter, each rank's own: their mean, for ranks of another number."""
    merged: dict[Any, Any] = {}
    for state in states:
        for parameter, kept in state.items():
            for name, value in kept.items():
                merged.setdefault(parameter, {}).setdefault(name, []).append(value)
    return {p: _means(kept) for p, kept in merged.items()}


def _means(kept: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Means over ranks of one parameter's state; a counter, which is the same on all ranks, stays as it is.

    A number beside tensors that have dimensions is a counter; beside none the parameter itself is a number.
    """
    dims = {name: first.dim() for name, (first, *_) in kept.items() if isinstance(first, Tensor)}
    counters = {name for name, dim in dims.items() if not dim and (name == "step" or any(dims.values()))}
    return {name: values[0] if name in counters else _mean(values) for name, values in kept.items()}


def _mean(values: Sequence[Any]) -> Any:
    """Mean of floating-point tensors; anything else stays as the first rank has it."""
    first = values[0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return first
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    for value in values:
        total += value.to(total.device)
    return (total / len(values)).to(first.dtype)
