"""Muon for a model's hidden matrices and AdamW for all else, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the size of its steps from Liu et al.,
"Muon is Scalable for LLM Training", 2025.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from replicas.loading import check_like

NEEDS = "MuonAdamW takes torch.optim.Muon, which came with torch 2.9, and this is torch {}: update it"


class MuonAdamW(Optimizer):
    """Takes Muon's steps with hidden matrices and AdamW's with all other parameters.

        optimizer = MuonAdamW(model, lr=3e-3)
        optimizer = DiLoCo(optimizer, model=model, compress="int2", sync_every=30)  # MuLoCo

    Muon replaces the momentum of a matrix by the nearest orthogonal one, by Newton–Schulz iterations, times
    0.2·√max(rows, columns), so that its elements are as large as AdamW's updates: one rate and one weight decay serve
    both. The steps are torch's own. There are two parameter groups, Muon's and AdamW's, which name their parameters and
    may be given rates of their own afterwards.

    Args:
        model: Model, all of whose parameters are trained. Its hidden matrices are its two-dimensional parameters, but
            for those of nn.Embedding and nn.EmbeddingBag and those that `adamw` names.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        momentum: Muon's μ, with Nesterov.
        betas: AdamW's.
        eps: AdamW's.
        adamw: Names of further parameters for AdamW, or of modules, for all their parameters: the output layer, and
            learned positions. Default: the last two-dimensional parameter, which is taken for the output layer.

    Raises:
        ImportError: torch is older than 2.9.
        ValueError: The model has no hidden matrix, or nothing of a name in `adamw`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw: Iterable[str] | None = None,
    ) -> None:
        names, every = hidden_matrices(model, adamw), list(model.named_parameters())
        matrices, others = ([(name, p) for name, p in every if (name in names) == hidden] for hidden in (True, False))
        muon = _muon()(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
        groups = [*muon.param_groups, *AdamW(others, lr, betas, eps, weight_decay).param_groups]
        self._parts: list[Optimizer] = []
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes both optimizers' steps; see torch.optim.Optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.state = self.state
            part.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of a MuonAdamW with the same hidden matrices; ValueError for any other."""
        check_like(state_dict, {"state": {}, "param_groups": [{}]}, "a MuonAdamW's state")
        theirs, own = (
            [group.get("param_names") for group in one] for one in (state_dict["param_groups"], self.param_groups)
        )
        if theirs != own:
            raise ValueError(f"the state is of groups of parameters {theirs}, but this MuonAdamW has {own}")
        super().load_state_dict(dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses further parameters, once the optimizer is made."""
        if self._parts:
            raise ValueError("a MuonAdamW holds all parameters of its model: make a new one for another model")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Makes the two optimizers over the present groups, which are new ones once a state was loaded."""
        muon, adamw = self.param_groups
        self._parts = [_muon()([muon]), AdamW([adamw])]


def hidden_matrices(model: nn.Module, adamw: Iterable[str] | None = None) -> set[str]:
    """Names of the parameters that are hidden matrices; see `MuonAdamW`."""
    every = list(model.named_parameters(remove_duplicate=False))
    matrices = [(name, p) for name, p in every if p.ndim == 2]
    asked = [adamw] if isinstance(adamw, str) else adamw
    asked = [name for name, _ in matrices[-1:]] if asked is None else list(asked)
    said = {name: {id(p) for key, p in every if f"{key}.".startswith(f"{name}.")} for name in asked}
    if unknown := [name for name, found in said.items() if not found]:
        raise ValueError(
            f"adamw names {unknown}, but the model has no such parameter or module: {[n for n, _ in every]}"
        )
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    others = embedded.union(*said.values())
    found = {name for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in others}
    if not found:
        raise ValueError(
            f"the model has no hidden matrix: no two-dimensional parameter besides embeddings and {asked}; "
            "take AdamW alone"
        )
    return found


def _muon() -> Callable[..., Optimizer]:
    kind: Callable[..., Optimizer] | None = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise ImportError(NEEDS.format(torch.__version__))
    return kind
