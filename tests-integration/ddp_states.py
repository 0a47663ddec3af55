"""Checkpoints of hook and optimizer by torch.distributed.checkpoint, and replicas that drift; for on_ranks.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer, reshard_residuals, sparse_hook
from data_parallel.schemes.table import COMPRESSORS
from ddp_cases import Run, all_steps, folder, gradients_of
from sparse_compress import RandomK
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.nn.parallel import DistributedDataParallel

OTHER_RANKS = "of another number of ranks goes through reshard_residuals"


def key():
    return f"optimizer {dist.get_rank()}"


def made(inner=torch.optim.SGD, comm=None, **options):
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(5, 3)), "b": nn.Parameter(torch.zeros(40))})
    inner = inner(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(inner, model.named_parameters(), comm=comm, **options)


def train(model, optimizer, steps):
    for step in steps:
        gradients = gradients_of(step, dist.get_rank(), shapes={"a": (5, 3), "b": (40,)})
        for name, p in model.items():
            p.grad = gradients[name]
        optimizer.step()


def same(one, other):
    """All that two states hold, in bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return one == other


def adam_amsgrad(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr, amsgrad=True)


def sgd_nesterov(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


OPTIONS = [
    {},
    {"momentum": 0.5, "bucket_bytes": 64},
    {"inner": torch.optim.Adam, "algorithm": "oktopk", "momentum": 0.5},
    {"inner": adam_amsgrad, "algorithm": "spardl", "nonfinite": "skip"},
    {"inner": sgd_nesterov, "algorithm": "dense"},
    {"inner": torch.optim.Adagrad, "compressor": RandomK(0.2)},
    {"inner": torch.optim.Adam, "algorithm": "powersgd", "options": {"rank": 1, "dense_steps": 1}, "verify": 2},
    {"inner": sgd_nesterov, "algorithm": "dense-int8", "nonfinite": "skip"},
]


def optimizer_by_dcp():
    """A new optimizer is a complete template: what was saved is loaded, and training ends in the same bits."""
    for options in OPTIONS:
        compressor = options.get("compressor")
        fresh = {} if compressor is None else {"compressor": RandomK(0.2)}
        (model, optimizer), (other, resumed), (_, stateful) = (
            made(**options),
            made(**{**options, **fresh}),
            made(**options),
        )
        train(model, optimizer, range(3))
        where = folder()
        dcp.save({key(): optimizer}, checkpoint_id=where)
        loaded = {key(): resumed.state_dict()}
        dcp.load(loaded, checkpoint_id=where)
        resumed.load_state_dict(loaded[key()])
        other.load_state_dict(model.state_dict())
        if compressor is None:
            dcp.load({key(): stateful}, checkpoint_id=where)
            assert same(stateful.state_dict(), optimizer.state_dict())
        own = optimizer.state_dict()
        assert same(resumed.state_dict(), own)
        exact = options.get("algorithm") in ("dense", "dense-int8")  # these are small integers
        assert exact or any(t.any() for t in own["distributed"]["residuals"].values())
        train(model, optimizer, range(3, 6))
        train(other, resumed, range(3, 6))
        assert same(dict(model.state_dict()), dict(other.state_dict()))


def new_optimizer():
    """Zeros for all that is trained; and saved before its first step it is new when it is loaded."""
    for options in OPTIONS:
        (model, optimizer), (other, loaded), (third, plain) = made(**options), made(**options), made(**options)
        own = optimizer.state_dict()["distributed"]
        compresses = options.get("algorithm") != "dense"
        assert sorted(own["residuals"]) == (["a", "b"] if compresses else [])
        assert sorted(own["velocities"]) == (["a", "b"] if options.get("momentum") else [])
        if "compressor" in options:
            continue  # the three share it
        where = folder()
        dcp.save({key(): optimizer}, checkpoint_id=where)
        dcp.load({key(): loaded}, checkpoint_id=where)
        for one in ((model, optimizer), (other, loaded), (third, plain)):
            train(*one, range(2))
        assert same(dict(model.state_dict()), dict(third.state_dict()))
        assert same(dict(other.state_dict()), dict(third.state_dict()))


def late_gradients():
    """A parameter that has had no gradient on this rank, as of a layer that is used later, is new when it is loaded."""

    def late(seed):
        torch.manual_seed(seed)
        model = nn.ParameterDict({"a": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(40))})
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, UpdateOptimizer(inner, model.named_parameters(), density=0.2)

    def steps(model, optimizer, which):
        for step in which:
            with optimizer.ahead():
                gradients = gradients_of(step, dist.get_rank(), shapes={"a": (5, 3), "b": (40,)})
                model["a"].grad = gradients["a"]
                model["b"].grad = gradients["b"] if step >= 3 + dist.get_rank() % 2 else None
            optimizer.step()

    (model, optimizer), (loaded, resumed) = late(0), late(1)
    steps(model, optimizer, range(3))
    where = folder()
    dcp.save({"model": model.state_dict(), key(): optimizer}, checkpoint_id=where)
    dcp.load({"model": loaded.state_dict(), key(): resumed}, checkpoint_id=where)
    assert len(resumed.optimizer.state) == 1
    for one in ((model, optimizer), (loaded, resumed)):
        steps(*one, range(3, 7))
    assert same(dict(model.state_dict()), dict(loaded.state_dict()))
    assert same(resumed.state_dict(), optimizer.state_dict())


class Picky(torch.optim.SGD):
    """Has a state, and cannot be stepped before it is told to."""

    ready = False

    def step(self, closure=None):
        if not vars(self).get("ready"):
            raise AssertionError("not yet")
        return super().step(closure)


def what_dcp_would_leave_out_is_an_error():
    def picky(parameters, lr):
        return Picky(parameters, lr=lr, momentum=0.9)

    (model, optimizer), (_, other) = made(inner=picky), made(inner=picky)
    optimizer.optimizer.ready = True
    train(model, optimizer, range(2))
    where = folder()
    dcp.save({key(): optimizer}, checkpoint_id=where)
    with pytest.raises(ValueError, match=r"the checkpoint holds \['0.momentum_buffer'.* which was not loaded"):
        dcp.load({key(): other}, checkpoint_id=where)


def torchs_helpers_are_refused():
    """They would leave the residuals out, and of an optimizer without a state take a step that throws some away."""
    for inner in (torch.optim.SGD, torch.optim.Adam):
        model, optimizer = made(inner=inner)
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        before = {name: t.clone() for name, t in optimizer.state_dict()["distributed"]["residuals"].items()}
        for call in (
            lambda o=optimizer, m=model: get_optimizer_state_dict(m, o),
            lambda o=optimizer, m=model: get_state_dict(m, o),
        ):
            with pytest.raises(RuntimeError, match=r"leave out what a DistributedOptimizer keeps .* dcp.save"):
                call()
        optimizer.zero_grad()
        assert same(optimizer.state_dict()["distributed"]["residuals"], before)


def by_dcp_on_other_ranks():
    """Fewer or more: an error that names the cause; then resharded, from one file of all that was saved."""
    everybody = dist.get_world_size()
    fewer, alone = dist.new_group(list(range(everybody - 1))), dist.get_rank() == everybody - 1
    zero = dist.new_group([0])
    run = all_steps(Run(), range(3))
    whole, some = folder(), folder()
    dcp.save({key(): run.state}, checkpoint_id=whole)
    if not alone:
        smaller = Run(process_group=fewer)
        with pytest.raises(CheckpointException, match=OTHER_RANKS):
            dcp.load({key(): smaller.state.state_dict()}, checkpoint_id=whole, process_group=fewer)
        smaller.step(0)
        dcp.save({key(): smaller.state}, checkpoint_id=some, process_group=fewer)
    dist.barrier()
    with pytest.raises(CheckpointException, match=OTHER_RANKS):
        dcp.load({key(): Run().state.state_dict()}, checkpoint_id=some)
    model, optimizer = made(inner=torch.optim.Adam)
    train(model, optimizer, range(2))
    where = folder()
    dcp.save({key(): optimizer}, checkpoint_id=where)
    if dist.get_rank() == 0:
        dcp_to_torch_save(where, f"{where}/whole.pt")
        states = torch.load(f"{where}/whole.pt", weights_only=True)
        _, other = made(inner=torch.optim.Adam, comm=zero)
        states = [states[f"optimizer {rank}"] for rank in range(everybody)]
        other.load_state_dict(reshard_residuals(states, 1)[0])
        found = other.state_dict()["distributed"]["residuals"]
        for name, tensor in found.items():
            total = sum(state["distributed"]["residuals"][name] for state in states)
            assert torch.allclose(tensor, total / everybody)
        assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
    dist.barrier()


def one_that_differs(module):
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(iter(module.parameters()))[0] += 1e-7


def verified():
    """Replicas that drift apart are an error within `verify` steps, on every rank."""
    for algorithm in ("gtopk", *COMPRESSORS):
        model, optimizer = made(verify=2, algorithm=algorithm)
        train(model, optimizer, range(4))
        one_that_differs(model)
        train(model, optimizer, range(1))
        with pytest.raises(
            RuntimeError, match="replicas differ after step 6: rank 1 in 'a', against most of the 3 ranks"
        ):
            train(model, optimizer, range(1))


def verified_under_ddp():
    for named, algorithm in ((True, "gtopk"), (False, "gtopk"), *((True, name) for name in COMPRESSORS)):
        run = Run(named=named, algorithm=algorithm, settings={"verify": 2})
        run.integers = algorithm == "gtopk"
        for step in range(5):
            run.step(step)
        if dist.get_rank() == 1:
            run.module.c.detach()[3:4].view(torch.int32).bitwise_xor_(1)
        with pytest.raises(
            RuntimeError, match=r"replicas differ before step 6: rank 1 in '(c|parameter [0-4])', against most of the 3"
        ):
            run.step(5)


def names_of_another_model():
    """What is kept would be saved under names that nobody finds again."""
    for named in (nn.Linear(3, 2).named_parameters(), [("weight", None)]):
        module = nn.Linear(3, 2)
        ddp = DistributedDataParallel(module)
        named = [(name, module.weight if p is None else p) for name, p in named]
        ddp.register_comm_hook(SparseHookState(named_parameters=named), sparse_hook)
        with pytest.raises(ValueError, match="that is not among named_parameters: give those of the module"):
            ddp(torch.ones(1, 3)).sum().backward()


def python_reducer():
    """DDP then gives the hook a tuple and takes nothing back."""
    module = nn.Linear(3, 2)
    ddp = DistributedDataParallel(module)
    state = SparseHookState()
    ddp.register_comm_hook(state, sparse_hook)
    with pytest.raises(
        TypeError, match=r"optimize_ddp = 'python_reducer'.* set torch._dynamo.config.optimize_ddp = True"
    ):
        sparse_hook(state, (torch.zeros(3), module.weight))


LAWS = [
    optimizer_by_dcp,
    new_optimizer,
    late_gradients,
    what_dcp_would_leave_out_is_an_error,
    torchs_helpers_are_refused,
    by_dcp_on_other_ranks,
    verified,
    verified_under_ddp,
    names_of_another_model,
    python_reducer,
]
SELDOM = [optimizer_by_dcp]
