"""Correction of Adam's step length for the noise of a rank's own gradient.

A rank's own gradient is μ + σ·noise, the mean over P ranks μ + σ/√P·noise. Adam divides by the root of the second
moment, μ² + σ² of the one and μ² + σ²/P of the other. So where ranks step by their own moments, the mean of their steps
is shorter than the step by the mean gradient, by

    √c,  c = ‖mean of g‖² / mean of ‖g‖² = f + (1 − f)/P,  f = μ² / (μ² + σ²),

down to 1/√P. c is measured. In each step a rank makes a sketch of an eighth of its gradients: `WIDTH` numbers whose
squares sum to ‖g‖² in the mean over random signs (Alon, Matias and Szegedy, STOC 1996). Every `EVERY` steps the ranks
sum these sketches, in one message beside the updates, and f comes from sums over steps, in which older steps have the
same weight as in the second moment itself. There is one f for the whole model: one per tensor did no better. f does not
depend on P, so it stays valid when a state moves to another number of ranks.

Decoupled weight decay is the same on one rank as on many, and is not lengthened; except for 16-bit parameters, where
most of it is rounded off, so that the remainder is not known.

Not covered: an eps that is large beside √v (steps are then not divided by their size, and come out too long), and a
weight decay that is added to gradients (its effect on v is common to all ranks, and is not seen).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from communicators import Communicator, Work, allreduce_async
from replicas import check_like
from torch import Tensor
from torch.optim import Optimizer

CORRECTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop)
"""Those whose steps are a mean over steps of gradients, divided by the root of a second moment."""
LINEAR = (torch.optim.SGD, torch.optim.ASGD)
"""The mean of their steps is the step by the mean gradient."""
EVERY = 8  # steps
WIDTH = 32
BATCH = 1 << 20
"""Elements; small tensors are taken together, because each call and kernel costs as much for a small one."""
ROW = 256  # elements, a multiple of WIDTH
SMALL = 4096
"""Elements below which tensors are put together first, as are others' last rows."""


def knows(optimizer: Optimizer) -> bool:
    """Whether the mean of ranks' own steps is made as long as the optimizer's step by the mean gradient."""
    return isinstance(optimizer, (*LINEAR, *CORRECTED))


def ahead_by(optimizer: Optimizer, ranks: int) -> float:
    """Factor a of `ErrorLookahead`: 1 for optimizers that are linear in the gradient, else 1/P."""
    return 1.0 if isinstance(optimizer, LINEAR) else 1 / ranks


class AdamStepCorrection:
    """Measures the part of ranks' gradients that is common to all, and lengthens steps to correct for the other part.

    Does nothing, at no cost, with one rank, and for an optimizer that is not `CORRECTED`.
    """

    def __init__(self, optimizer: Optimizer, comm: Communicator) -> None:
        self._optimizer, self._comm = optimizer, comm
        self._concerned = (comm.size > 1 or comm.elastic) and isinstance(optimizer, CORRECTED)
        self._sums = torch.zeros(2, dtype=torch.float64, device="cpu")  # of μ², and of μ² + σ²; alike on all ranks
        self._looks = _no_looks()  # since ranks spoke of them
        self._under_way: Work[Tensor] | None = None  # their sum, within a step

    @property
    def signal(self) -> float:
        """f, between 0 and 1; 1 where nothing was measured."""
        common, whole = self._sums.tolist()
        return min(1.0, max(0.0, common / whole)) if whole > 0 else 1.0

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Measured sums and sketches; empty if nothing is corrected."""
        return {"own_noise": {"sums": self._sums.clone(), "looks": self._looks.clone()}} if self._concerned else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads from a mapping that contains a `state_dict`; starts afresh if that was empty."""
        own = state.get("own_noise", {"sums": torch.zeros(2, dtype=torch.float64, device="cpu"), "looks": _no_looks()})
        check_like(own, {"sums": self._sums, "looks": self._looks}, "own_noise")
        self._sums, self._looks = own["sums"].cpu().clone(), own["looks"].cpu().clone()
        self._under_way = None  # of a step that failed before it was waited for

    @torch.no_grad()
    def look(self, parameters: Sequence[Tensor], step: int) -> None:
        """Sketches this rank's gradients; every `EVERY` steps starts to sum sketches over ranks, who call it together.

        A step with a non-finite gradient on any rank does not count, nor does a rank without any gradient.
        """
        if not self._concerned:
            return
        if any(p.grad is not None for p in parameters):
            own = sketch(parameters, step).to("cpu", torch.float64)
            self._looks[step % EVERY] = torch.cat([own, own.square().sum()[None], torch.ones(1, device="cpu")])
        if step % EVERY == 0:
            self._under_way = allreduce_async(self._looks.to(parameters[0].device), self._comm)
            self._looks = _no_looks()

    def wait(self) -> None:
        """Waits for a sum that `look` has started, and counts it from the next step on."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            total = under_way.wait().cpu().view(EVERY, -1)
            self._sums = self._decay() ** EVERY * self._sums + _common_and_whole(total)

    @torch.no_grad()
    def lengthen(self, updates: Mapping[Tensor, Tensor]) -> None:
        """Multiplies by 1/√c, in place, what the optimizer has just added to each parameter, as in `updates`.

        The parameters have their values from before. Decoupled weight decay stays as it is.
        """
        if not self._concerned:
            return
        more = (self.signal + (1 - self.signal) / self._comm.size) ** -0.5 - 1
        for group in self._optimizer.param_groups:
            decoupled = group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW))
            decay = float(group["lr"] * group["weight_decay"]) if decoupled else 0.0
            for moved in in_batches([p for p in dict.fromkeys(group["params"]) if p.grad is not None and p in updates]):
                adapted = own = [updates[p] for p in moved]
                if decay:
                    adapted = list(torch._foreach_mul(moved, [decay if p.dtype.itemsize > 2 else 0.0 for p in moved]))
                    torch._foreach_add_(adapted, own)
                torch._foreach_add_(own, adapted, alpha=more)

    def _decay(self) -> float:
        """Decay factor per step of the second moment, for most elements."""
        groups = self._optimizer.param_groups
        largest: Any = max(groups, key=lambda group: sum(p.numel() for p in group["params"]))
        return float(largest["betas"][1] if "betas" in largest else largest["alpha"])  # the second: RMSprop's


def without_looks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a mapping that contains a `state_dict`, for another number of ranks: without one rank's sketches."""
    own = {"own_noise": {**state["own_noise"], "looks": _no_looks()}} if "own_noise" in state else {}
    return {**state, **own}


def _no_looks() -> Tensor:
    """Empty table of sketches, one row a step: the sketch, its square, and whether there is one."""
    return torch.zeros(EVERY, WIDTH + 2, dtype=torch.float64, device="cpu")


def _common_and_whole(total: Tensor) -> Tensor:
    """μ² and μ² + σ², summed over the steps of which two ranks or more have looks, from looks summed over ranks."""
    total = total[total.isfinite().all(1) & (total[:, -1] > 1)]
    ranks = total[:, -1]
    of_mean, of_own = (total[:, :-2] / ranks[:, None]).square().sum(1), total[:, -2] / ranks
    common = (of_mean - of_own / ranks) / (1 - 1 / ranks)
    return torch.stack([common.sum(), of_own.sum()])


def sketch(parameters: Sequence[Tensor], step: int) -> Tensor:
    """`WIDTH` numbers, float32: each a sum of gradients' elements with random signs, of those that are in turn.

    Their squares sum up to those of these elements, in the mean over the signs, which are those of the step. A sign is
    the product of two, of a place in a tile and of a tile, so that √n are drawn and gradients that are all alike spread
    too. A parameter without a gradient counts as zeros. In `EVERY` steps each element has its turn once.
    """
    rows, generator = _in_turn(parameters, step), torch.Generator().manual_seed(step)
    tiles = torch.split(rows, max(1, math.isqrt(len(rows))))
    inner, outer = (_signs(count, generator).to(rows.device) for count in (len(tiles[0]), len(tiles)))
    found = torch.zeros(ROW, device=rows.device)
    for tile, sign in zip(tiles, outer, strict=True):
        found += sign * (inner[: len(tile)] * tile).sum(0)
    return found.view(-1, WIDTH).sum(0)


def _in_turn(parameters: Sequence[Tensor], step: int) -> Tensor:
    """Gradients' elements as rows of `ROW`, of which every so many are in turn: the same ones on all ranks."""
    device, rows, small = parameters[0].device, [], []
    for p in parameters:
        whole = p.numel() // ROW if p.numel() >= SMALL else 0
        flat = p.new_zeros(1).expand(p.numel()) if p.grad is None else p.grad.reshape(-1)
        if whole:
            rows.append(flat[: whole * ROW].view(whole, ROW)[step % EVERY :: EVERY].to(device, torch.float32))
            flat = flat[whole * ROW :]
        small.append(flat.to(device, torch.float32))
    together = torch.cat(small)
    filled = torch.nn.functional.pad(together, (0, -together.numel() % ROW))
    return torch.cat([*rows, filled.view(-1, ROW)[step % EVERY :: EVERY]])


def _signs(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (rows, ROW), generator=generator, dtype=torch.float32, device="cpu").mul_(2).sub_(1)


def in_batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of `BATCH` elements or less, or of one larger tensor: what is computed of one is no second model."""
    batch, numel = list[Tensor](), 0
    for tensor in tensors:
        if batch and numel + tensor.numel() > BATCH:
            yield batch
            batch, numel = [], 0
        batch.append(tensor)
        numel += tensor.numel()
    if batch:
        yield batch
