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
from torch.nn.parallel import DistributedDataParallel

WAYS = {
    "DistributedOptimizer": lambda inner, model, **o: DistributedOptimizer(
        inner, model.named_parameters(), density=0.5, **o
    ),
    "EagerSGD": lambda inner, model, **o: EagerSGD(inner, model.named_parameters(), model=model, **o),
    "LocalSGD": lambda inner, model, **o: LocalSGD(inner, model=model, **o),
}
BY_MODULE = ("EagerSGD", "LocalSGD")
"""Wrappers that are given the module, and so its process group."""


def loss_of(model, step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, 8, generator=generator)).square().mean()


class OfAFramework(DistributedDataParallel):
    """A subclass."""


def said(name, *, plain=False, group=None, ignored=False, kind=DistributedDataParallel, **options):
    """Warnings of six steps through DDP, whose module the wrapper is given, or with `plain` the one inside.

    ignored: a layer that no wrapper has is DDP's, all others it is told to leave alone.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    theirs = nn.Linear(8, 8).requires_grad_(False) if ignored else nn.Identity()
    both = nn.Sequential(theirs, model)
    if ignored:
        theirs.bias.requires_grad_(True)
        names = [name for name, _ in both.named_parameters() if not name.startswith("0.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, names)
    ddp = kind(both, process_group=group)
    given = model if plain else ddp
    if ignored:
        theirs.bias.requires_grad_(False)  # no wrapper has it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = WAYS[name](torch.optim.SGD(model.parameters(), lr=0.01), given, **options)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(given, step).backward()
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
        for options in ({}, {"kind": OfAFramework}):
            found = said(name, **options)
            assert len(found) == 1, (name, found)
            assert "whole, among the same ranks" in found[0]
            assert "ddp.no_sync()" in found[0]
            assert "give ddp.module" in found[0]


def where_the_plain_module_is_given_all_is_silent():
    for name in WAYS:
        assert not said(name, plain=True), name


def where_ddp_leaves_a_wrappers_parameters_alone_all_is_silent():
    for name in BY_MODULE:
        assert not said(name, ignored=True), name


def a_wrapper_of_one_rank_exchanges_nothing_twice():
    alone = [dist.new_group([rank]) for rank in range(4)]
    for name in WAYS:
        for comm in (alone[dist.get_rank()], as_communicator(alone[dist.get_rank()])):
            assert not said(name, comm=comm), name


def where_ddp_exchanges_inside_a_node_and_the_wrapper_between_nodes_all_is_silent():
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    places = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    for name in WAYS:
        assert not said(name, group=nodes[rank // 2], comm=places[rank % 2]), name
    for name in BY_MODULE:
        assert not said(name, group=nodes[rank // 2]), name  # the mean over all is that over nodes
        assert said(name, group=nodes[rank // 2], comm=nodes[rank // 2]), name


def said_of(group=None, hook=None, no_sync=False):
    """Warnings of an optimizer that was made for a module which then is put into DDP, as frameworks do."""
    model = nn.Linear(8, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = UpdateOptimizer.for_model(torch.optim.SGD(model.parameters(), lr=0.01), model, steps=20)
        ddp = DistributedDataParallel(model, process_group=group)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for step in range(3):
            with ddp.no_sync() if no_sync else nullcontext():
                loss_of(ddp, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "DistributedDataParallel" in str(one.message)]


def what_ddp_exchanges_too_is_said_where_ddp_comes_last():
    found = said_of()
    assert len(found) == 1, found
    assert "whole, among the same ranks" in found[0]
    assert not said_of(hook=noop_hook)
    assert not said_of(no_sync=True)
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    assert not said_of(group=nodes[dist.get_rank() // 2])


LAWS = [
    what_ddp_exchanges_too_is_said_where_ddp_comes_last,
    what_ddp_exchanges_too_is_said_once,
    where_the_plain_module_is_given_all_is_silent,
    where_ddp_leaves_a_wrappers_parameters_alone_all_is_silent,
    a_wrapper_of_one_rank_exchanges_nothing_twice,
    where_ddp_exchanges_inside_a_node_and_the_wrapper_between_nodes_all_is_silent,
]
SELDOM = LAWS[2:]
