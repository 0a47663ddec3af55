"""Copies of a hook's state, by copy.deepcopy or by pickle: alone, or with the DDP module that it belongs to.

A copy has its own settings, residuals, momenta and algorithm state, and is independent of the original. It belongs to
the copied parameters, so a DDP module and its state are copied in one call. Ranks and exchange are looked up at first
use.

With copy.deepcopy the copy shares the process group and the GradScaler, which cannot be copied. With pickle it belongs
to the default group, as DDP does, and to this rank: another rank refuses it at first use.

DDP itself copies hook and state, whatever the hook, but does not register them with the copy's reducer: to train a
copy, call `copy.register_comm_hook(state, sparse_hook)`; otherwise it sums dense gradients.
"""

from __future__ import annotations

from typing import Any

from replicas import default_group


def refuse_pickled(group: Any, grad_scaler: Any) -> None:
    """Raises RuntimeError for state that pickle would lose silently."""
    remedy = "save state.state_dict(), and load it into a new SparseHookState"
    if group is not None and group is not default_group():
        raise RuntimeError(f"a SparseHookState of another process group than the default one is no file: {remedy}")
    if grad_scaler is not None:
        raise RuntimeError(
            "a SparseHookState with a grad_scaler is no file, because it would follow a copy of the scaler that nobody "
            f"updates: {remedy}"
        )
