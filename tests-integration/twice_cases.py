"""DDP round a module whose wrapper exchanges too, on two nodes of two ranks, for on_ranks.py."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from communicators import as_communicator
from data_parallel import DistributedOptimizer, UpdateOptimizer
from local_sgd import LocalSGD
from partial_collectives import EagerSGD
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

WAYS = {
    "DistributedOptimizer": lambda inner, model, **o: DistributedOptimizer(
        inner, model.named_parameters(), density=0.5, **o
    ),
    "overlapped": lambda inner, model, **o: DistributedOptimizer(
        inner, model.named_parameters(), density=0.5, overlap=True, **o
    ),
    "updates": lambda inner, model, **o: UpdateOptimizer(inner, model.named_parameters(), density=1.0, **o),
    "EagerSGD": lambda inner, model, **o: EagerSGD(inner, model.named_parameters(), **o),
    "LocalSGD": lambda inner, model, **o: LocalSGD(inner, model=model, **o),
}


def loss_of(model, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, 8, generator=generator)).square().mean()


class OfAFramework(DistributedDataParallel):
    """A subclass."""


class Unhashable(type):
    __eq__ = type.__eq__
    __hash__ = None


ODD = [Unhashable("Odd", (), {})()]
"""Among all that is alive."""


def local_hook(state, bucket):
    """A user's own that sends nothing."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def said(
    name,
    *,
    before=0,
    around=None,
    plain=False,
    group=None,
    hook=None,
    static=False,
    ignored=False,
    kind=DistributedDataParallel,
    **options,
):
    """Warnings of six steps through DDP, or past it, after `before` steps of DDP's own.

    ignored: a layer that no wrapper has is DDP's, all others it is told to leave alone.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    if ignored:
        theirs, model = nn.Linear(8, 8), nn.Sequential(model)
        both = nn.Sequential(theirs, model)
        names = [name for name, _ in both.named_parameters() if not name.startswith("0.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, names)
    ddp = kind(both if ignored else model, process_group=group, static_graph=static)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    for step in range(before):
        loss_of(ddp, step).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = WAYS[name](torch.optim.SGD(model.parameters(), lr=0.01), model, **options)
        for step in range(6):
            optimizer.zero_grad()
            with ddp.no_sync() if around == "no_sync" else nullcontext():
                loss_of(model if plain else ddp, step).backward()
            optimizer.step()
            if hasattr(optimizer, "average"):
                optimizer.average()
    if hasattr(optimizer, "finish"):
        optimizer.finish()
    getattr(optimizer, "close", lambda: None)()
    dist.barrier()
    return [str(one.message) for one in caught if "DistributedDataParallel" in str(one.message)]


def what_ddp_exchanges_too_is_said_once():
    for name in WAYS:
        for options in ({}, {"static": True}, {"kind": OfAFramework}) if name == "LocalSGD" else ({},):
            found = said(name, **options)
            assert len(found) == 1, (name, found)
            assert "whole, among the same ranks" in found[0]
            assert "ddp.no_sync()" in found[0]


def where_ddp_exchanges_nothing_all_is_silent():
    """Its backwards in no_sync(), past it, before there was the wrapper, or with a hook that sends nothing."""
    for name in WAYS:
        for options in ({"around": "no_sync"}, {"plain": True}, {"before": 2, "plain": True}, {"hook": noop_hook}):
            assert not said(name, **options), (name, options)


def where_ddp_leaves_a_wrappers_parameters_alone_all_is_silent():
    for name in WAYS:
        assert not said(name, ignored=True), name


def a_wrapper_of_one_rank_exchanges_nothing_twice():
    alone = [dist.new_group([rank]) for rank in range(4)]
    for name in WAYS:
        for comm in (alone[dist.get_rank()], as_communicator(alone[dist.get_rank()])):
            assert not said(name, comm=comm), name


def of_a_users_own_hook_only_that_it_comes_first_is_said():
    """Whether it sends anything is not known."""
    for name in WAYS:
        found = said(name, hook=local_hook)
        assert len(found) == 1, (name, found)
        assert "hook 'local_hook'" in found[0]
        assert "among the same ranks" not in found[0]
    found = said("LocalSGD", hook=allreduce_hook)
    assert len(found) == 1
    assert "whole, among the same ranks" in found[0]


def where_ddp_exchanges_inside_a_node_and_the_wrapper_between_nodes_all_is_silent():
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    places = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    for name in WAYS:
        assert not said(name, group=nodes[rank // 2], comm=places[rank % 2]), name
        assert not said(name, group=nodes[rank // 2]), name  # the mean over all is that over nodes
        assert said(name, group=nodes[rank // 2], comm=nodes[rank // 2]), name


LAWS = [
    what_ddp_exchanges_too_is_said_once,
    where_ddp_exchanges_nothing_all_is_silent,
    where_ddp_leaves_a_wrappers_parameters_alone_all_is_silent,
    a_wrapper_of_one_rank_exchanges_nothing_twice,
    of_a_users_own_hook_only_that_it_comes_first_is_said,
    where_ddp_exchanges_inside_a_node_and_the_wrapper_between_nodes_all_is_silent,
]
