"""Parameters that are frozen, unfrozen or added after the DistributedOptimizer was made."""

import copy
import pickle

import pytest
import torch
from communicators import CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from torch import nn

either_way = pytest.mark.parametrize("overlap", [False, True])


def wrapped(inner, model, comm, kind=DistributedOptimizer, **options):
    return kind(inner, model.named_parameters(), comm=comm, **options)


def made(comm, *, frozen=(), **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for position in frozen:
        model[position].requires_grad_(False)
    torch.manual_seed(comm.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    return model, wrapped(inner, model, comm, **options)


def train_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@either_way
def test_unfreezing_later_is_an_error_on_every_rank_before_anything_is_sent(overlap):
    def body(comm):
        model, optimizer = made(comm, frozen=[0], overlap=overlap)
        train_step(model, optimizer)
        model[0].requires_grad_(True)
        sent, before = comm.bytes_sent, flat(model)
        with pytest.raises(ValueError, match=r"not exchanged: \['0.weight', '0.bias'\]; .* new DistributedOptimizer"):
            train_step(model, optimizer)
        assert comm.bytes_sent == sent
        assert torch.equal(flat(model), before)

    SimulatedWorld(2).run(body)


@either_way
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_new_optimizer_of_the_wrapped_one_goes_on(overlap, frozen):
    """Also while a scheduler, or the user, still holds the one before."""

    def body(comm, trains):
        model, optimizer = made(comm, frozen=[] if trains else [frozen], overlap=overlap, bucket_bytes=24)
        train_step(model, optimizer)
        model[frozen].requires_grad_(not trains)
        with pytest.raises(ValueError, match="new DistributedOptimizer"):
            train_step(model, optimizer)
        before = optimizer
        optimizer = wrapped(before.optimizer, model, comm, overlap=overlap, bucket_bytes=24)
        for _ in range(3):
            train_step(model, optimizer)
        return flat(model)

    for trains in (False, True):
        one, other = SimulatedWorld(2).run(lambda comm, trains=trains: body(comm, trains))
        assert torch.equal(one, other)


def test_a_group_added_to_the_wrapped_optimizer_only():
    def body(comm):
        model, optimizer = made(comm)
        extra = nn.Parameter(torch.ones(2))
        optimizer.optimizer.add_param_group({"params": [extra]})
        with pytest.raises(ValueError, match=r"not exchanged: \['\(group 1, shape \(2,\)\)'\]"):
            train_step(model, optimizer)

    SimulatedWorld(2).run(body)


def test_a_gradient_from_before_the_freezing_would_be_stepped_by_each_rank_alone():
    model = nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    model.bias.requires_grad_(False)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=1.0), model, None)
    with pytest.raises(ValueError, match=r"not exchanged: \['bias'\]"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


@either_way
def test_freezing_later_is_an_error_and_moves_nothing(overlap):
    def body(comm):
        model, optimizer = made(comm, overlap=overlap)
        train_step(model, optimizer)
        model[0].requires_grad_(False)
        sent, before = comm.bytes_sent, flat(model)
        with pytest.raises(ValueError, match=r"frozen later, but are exchanged: \['0.*unfreeze them, or"):
            train_step(model, optimizer)
        assert (comm.bytes_sent, model[0].weight.grad) == (sent, None)
        assert torch.equal(flat(model), before)
        model[0].requires_grad_(True)
        train_step(model, optimizer)
        return flat(model)

    one, other = SimulatedWorld(2).run(body)
    assert torch.equal(one, other)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(duplicate):
    """It would share the communicator, and its parameters would not be the model's."""
    model = nn.Linear(3, 2)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=1.0), model, None)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: save its state_dict\(\)"):
        duplicate(optimizer)
    copy.deepcopy(optimizer.state_dict())


@either_way
def test_parameters_that_a_load_has_replaced_are_an_error_of_the_next_step(overlap):
    """load_state_dict(assign=True): the optimizer's would never get a gradient again."""

    def body(comm):
        model, optimizer = made(comm, overlap=overlap)
        train_step(model, optimizer)
        own = dict(model.named_parameters())
        model.load_state_dict({name: p.detach() + 1 for name, p in own.items()}, assign=True)
        with pytest.raises(ValueError, match=r"'0.weight' and 3 more of 4 were replaced.*assign=False"):
            train_step(model, optimizer)
        for name, p in own.items():  # swapped out for a while, as for an evaluation
            setattr(model.get_submodule(name[0]), name[2:], p)
        train_step(model, optimizer)
        return flat(model)

    one, other = SimulatedWorld(2).run(body)
    assert torch.equal(one, other)


def test_a_weight_that_is_tied_to_another_later_is_none_of_these():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model, None)
    model[1].weight = model[0].weight
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()


@either_way
@pytest.mark.parametrize("again", [False, True])
def test_weights_that_one_rank_alone_has_loaded_are_an_error_of_the_first_step(overlap, again):
    """Also after a state was loaded."""

    def body(comm):
        model, optimizer = made(comm, overlap=overlap)
        if again:
            train_step(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
        if comm.rank == 0:
            model.load_state_dict({name: p.detach() + 1 for name, p in model.named_parameters()})
        train_step(model, optimizer)

    with pytest.raises(CollectiveError, match=r"begun with parameters of hash \w{16} \(load weights on all"):
        SimulatedWorld(3).run(body)


def plateau(comm, **options):
    """A rate that goes by each rank's own loss."""
    model, optimizer = made(comm, **options)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(110):
        train_step(model, optimizer)
        scheduler.step(step if comm.rank else -step)
    return flat(model)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"kind": UpdateOptimizer, "density": 1.0}])
def test_a_rate_that_goes_by_a_ranks_own_loss_is_an_error_within_a_hundred_steps(options):
    with pytest.raises(CollectiveError, match=r"with parameter groups of lr 0.1,.*rank 1 calls .*of lr \S*e-"):
        SimulatedWorld(2).run(lambda comm: plateau(comm, **options))


def test_with_verify_0_nothing_is_compared():
    one, other = SimulatedWorld(2).run(lambda comm: plateau(comm, verify=0))
    assert not torch.equal(one, other)


def test_what_an_optimizer_adapts_in_its_groups_is_each_ranks_own():
    """As Prodigy and D-Adaptation keep their estimates; a tensor too."""

    def body(comm):
        model, optimizer = made(comm)
        optimizer.param_groups[0] |= {"d": 0.1 * comm.rank, "buffer": torch.full((3,), float(comm.rank))}
        train_step(model, optimizer)
        return flat(model)

    one, other = SimulatedWorld(2).run(body)
    assert torch.equal(one, other)
