"""Objects that look at every optimizer's steps: one hook of torch's for all, which keeps none of them alive."""

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from communicators import SimulatedWorld
from data_parallel import DistributedOptimizer, SparseHookState, sparse_hook
from data_parallel.optimizer_watch import OptimizerWatch
from data_parallel.settings import Settings
from sparse_compress import ByParts, TopK, WarmUp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.optim.optimizer import _global_optimizer_post_hooks

pytestmark = pytest.mark.quick


@pytest.fixture
def group():
    """One rank, which is enough to select."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(parameters, momentum=0.0):
    return torch.optim.SGD(parameters, lr=0.01, momentum=momentum)


class Behind:
    """Steps of an optimizer behind the hook, and what was said in each."""

    def __init__(self, make=sgd, *, unused=False, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 20), nn.Linear(20, 5))
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=unused)
        state = SparseHookState(named_parameters=self.model.named_parameters(), **{"density": 0.05} | settings)
        self.ddp.register_comm_hook(state, sparse_hook)
        self.optimizer = make(self.model.parameters())
        self.said = []

    def steps(self, count, *, backwards=1, after=lambda model: None, schedule=None):
        """after: between backward and the step. Returns the warnings of these steps."""
        before = len(self.said)
        for _ in range(count):
            self.optimizer.zero_grad()
            for _ in range(backwards):
                self.ddp(torch.randn(8, 30)).square().mean().backward()
            after(self.model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.optimizer.step()
            self.said += [str(warning.message) for warning in caught]
            if schedule is not None:
                schedule.step()
        return self.said[before:]


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_values(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("clips", [clip, clip_values])
def test_clipping_that_begins_late_is_seen(group, clips):
    """Behind a dense warm-up longer than any first look, and steps later; once."""
    behind = Behind(density=WarmUp(0.05, steps=60, stages=(1.0,)))
    assert behind.steps(90) == []
    (said,) = behind.steps(30, after=clips)
    assert "scaled down between the exchange and step()" in said
    assert "SparseHookState(..., clip_norm=...)" in said


def test_clipping_loses_nothing_where_all_was_sent(group):
    assert Behind(density=WarmUp(0.05, steps=30, stages=(1.0,))).steps(30, after=clip) == []
    assert Behind(density=1.0).steps(30, after=clip) == []


def test_a_compressor_of_a_shards_parts_is_not_asked_for_the_whole():
    watch = OptimizerWatch("sparse_hsdp", "", Settings(compressor=ByParts(TopK(0.5), [2])))
    whole = nn.Parameter(torch.ones(4))
    watch.note([whole], [torch.ones(2)], 1)
    assert watch.given[whole] is not None


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [2, 4])
def test_accumulation_without_no_sync_is_not_clipping_and_hides_none(group, backwards):
    """DDP cuts its buckets anew between the first backwards, which are of one step."""
    behind = Behind()
    assert behind.steps(30, backwards=backwards) == []
    (said,) = behind.steps(30, backwards=backwards, after=clip)
    assert "scaled down" in said


def test_a_layer_frozen_half_way_is_not_clipping_and_hides_none(group):
    def frozen(model):
        for p in model[1].parameters():
            p.grad = None

    def zeroed(model):
        for p in model[1].parameters():
            p.grad.zero_()

    def clipped(model):
        frozen(model)
        clip(model)

    behind = Behind(unused=True)
    assert behind.steps(10) == []
    assert behind.steps(20, after=zeroed) == []
    behind.model[1].requires_grad_(False)
    assert behind.steps(20, after=frozen) == []
    (said,) = behind.steps(20, after=clipped)
    assert "scaled down" in said


def test_a_step_that_was_left_out_is_not_compared_with_the_next(group):
    behind = Behind()
    for scale in (1e3, 1.0) * 10:
        behind.optimizer.zero_grad()
        (scale * behind.ddp(torch.randn(8, 30)).square().mean()).backward()
        if scale == 1.0:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                behind.optimizer.step()


def test_each_optimizer_of_one_module_is_seen(group):
    """Such as Muon for matrices and Adam for the others, each clipped by itself."""
    behind = Behind(lambda parameters: sgd([p for p in parameters if p.ndim == 2]))
    biases = [p for p in behind.model.parameters() if p.ndim == 1]
    other, said = sgd(biases), []

    def second_step(model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            behind.optimizer.step()
            nn.utils.clip_grad_norm_(biases, 1e-6)
            other.step()
        said.extend(str(warning.message) for warning in caught)

    behind.steps(30, after=second_step)
    assert len(said) == 1
    assert "scaled down" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "dtype"), [(1 / 32, torch.float32), (0.9, torch.float32), (1 / 80, torch.bfloat16)])
def test_a_division_by_a_constant_is_not_clipping_and_hides_none(group, factor, dtype):
    """Such as by the number of tokens; it loses nothing."""

    def divide(model):
        for p in model.parameters():
            p.grad.copy_(p.grad.to(dtype).mul_(factor))

    behind = Behind()
    assert behind.steps(200, after=divide) == []
    (said,) = behind.steps(30, after=clip)
    assert "scaled down" in said


ADAPTIVE = [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Rprop]


@pytest.mark.parametrize("make", [*ADAPTIVE, torch.optim.AdamW])
def test_what_adapts_to_the_size_of_gradients_is_told(group, make):
    (said,) = Behind(make).steps(10)
    assert f"{make.__name__} behind a sparse exchange" in said
    assert Behind(make, density=0.5).steps(10) == []


def test_lbfgs_is_told(group):
    def closure():
        behind.optimizer.zero_grad()
        loss = behind.ddp(torch.ones(2, 30)).square().mean()
        loss.backward()
        return loss

    behind = Behind(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            behind.optimizer.step(closure)
    (said,) = {str(warning.message) for warning in caught}
    assert "LBFGS behind a sparse exchange" in said
    assert "algorithm='dense'" in said


@pytest.mark.slow
def test_clipping_of_all_at_once_is_seen_by_each_of_two_optimizers(group):
    """Whose shares of the common norm vary."""
    behind = Behind(lambda parameters: sgd([p for p in parameters if p.ndim == 2]))
    other = sgd([p for p in behind.model.parameters() if p.ndim == 1])
    assert behind.steps(20) == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = behind.steps(30, after=lambda model: (clip(model), other.step()))
    assert ["scaled down" in text for text in [*said, *(str(warning.message) for warning in caught)]] == [True]


def test_momentum_in_both_places_is_told_of_rmsprop_too(group):
    (said,) = Behind(lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9), momentum=0.9).steps(10)
    assert "momentum is on twice" in said


def one_cycle(optimizer, **given):
    return OneCycleLR(optimizer, max_lr=0.01, total_steps=100, **given)


def cyclic(optimizer, **given):
    return CyclicLR(optimizer, base_lr=0.001, max_lr=0.01, **given)


@pytest.mark.parametrize("scheduler", [one_cycle, cyclic])
@pytest.mark.parametrize("late", [0, 20])
def test_a_scheduler_that_cycles_momentum_is_named(group, scheduler, late):
    behind = Behind(momentum=0.9)
    assert behind.steps(late) == []
    (said,) = behind.steps(20, schedule=scheduler(behind.optimizer))
    assert "momentum is on twice" in said
    assert "OneCycleLR and CyclicLR" in said
    assert "cycle_momentum=False" in said


@pytest.mark.parametrize("scheduler", [one_cycle, cyclic])
def test_a_scheduler_that_leaves_momentum_alone_is_not_remarked_on(group, scheduler):
    behind = Behind(momentum=0.9)
    assert behind.steps(20, schedule=scheduler(behind.optimizer, cycle_momentum=False)) == []


def test_momentum_in_both_places_without_such_a_scheduler_names_none(group):
    (said,) = Behind(lambda parameters: sgd(parameters, momentum=0.9), momentum=0.9).steps(20)
    assert "momentum is on twice" in said
    assert "cycle_momentum" not in said


@pytest.mark.filterwarnings("default:momentum=.* has little effect")
@pytest.mark.parametrize(
    ("density", "momentum", "expected"), [(0.25, 0.9, 1), (0.25, 0.5, 0), (0.01, 0.9, 0), (1.0, 0.9, 0), (0.25, 0.0, 0)]
)
def test_momentum_that_is_cleared_with_most_entries_is_told(group, density, momentum, expected):
    said = Behind(momentum=momentum, density=density).steps(20)
    assert ["momentum=0.9 has little effect at a density of 0.25" in text for text in said] == [True] * expected


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scheduler_around_a_distributed_optimizer_is_named(wrapped):
    """Made behind it, as schedulers are, around either of the two."""

    def body(comm):
        model = nn.Linear(30, 20)
        inner = sgd(model.parameters())
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, density=0.05, momentum=0.9)
        one_cycle(inner if wrapped else optimizer)
        for _ in range(20):
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SimulatedWorld(1).run(body)
    (said,) = [str(warning.message) for warning in caught if "momentum" in str(warning.message)]
    assert "cycle_momentum=False" in said
    assert "in the optimizer, after it" in said


@pytest.mark.slow
def test_states_and_their_copies_leave_one_hook_at_most():
    state = SparseHookState()
    before = len(_global_optimizer_post_hooks)
    for _ in range(10):
        state = copy.deepcopy(state)
    del state
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before
