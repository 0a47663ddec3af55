"""What a copy of a hook's state is, by copy.deepcopy or by pickle: alone, or with the DDP module that it belongs to.

It has copies of the settings, the residuals, the momenta and the algorithm's state, and goes on by itself: what one of
the two sends or keeps is nothing to the other. It belongs to the copied parameters, so of a DDP module both are copied
in one call. Ranks and exchange are looked up at the first use.

By copy.deepcopy it shares the process group and the GradScaler, which cannot be copied. By pickle it is of the default
group, as DDP is, and of this rank: another rank refuses it at its first use.

DDP itself keeps hook and state in a copy, but does not register them with the copy's reducer, with any hook: a copy
that is to train has `copy.register_comm_hook(state, sparse_hook)`, or sums whole gradients.
"""

from __future__ import annotations

from typing import Any

from communicators.replicas.default_group import default_group


def refuse_pickled(group: Any, grad_scaler: Any) -> None:
    """Raises RuntimeError for what would be lost without a word."""
    remedy = "save state.state_dict(), and load it into a new SparseHookState"
    if group is not None and group is not default_group():
        raise RuntimeError(f"a SparseHookState of another process group than the default one is no file: {remedy}")
    if grad_scaler is not None:
        raise RuntimeError(
            "a SparseHookState with a grad_scaler is no file, because it would follow a copy of the scaler that nobody "
            f"updates: {remedy}"
        )
