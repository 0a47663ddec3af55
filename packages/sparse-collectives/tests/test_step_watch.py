"""Objects that look at every optimizer's steps: one hook of torch's for all, which keeps none of them alive."""

import copy
import gc

import torch
from sparse_collectives import SparseHookState
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook


def stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_states_and_their_copies_leave_one_hook_at_most():
    state = SparseHookState()
    before = len(_global_optimizer_post_hooks)
    for _ in range(10):
        state = copy.deepcopy(state)
    del state
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before


def test_one_that_has_seen_enough_does_not_break_the_step_for_others():
    """torch goes through its hooks while they are called: none may be taken out meanwhile."""
    states, seen = [SparseHookState() for _ in range(3)], []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        for state in states:
            state._seen._squares = {(0,): torch.zeros(())}
            state._seen.look = lambda _: False
        stepped(nn.Linear(3, 1))
        assert seen == [1]
    finally:
        handle.remove()
