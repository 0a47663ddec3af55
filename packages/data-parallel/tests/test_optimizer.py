"""DistributedOptimizer: what a training loop does with it."""

import copy
import sys

import pytest
import torch
from communicators import Alone, CollectiveError, SimulatedWorld
from data_parallel import DistributedOptimizer, UpdateOptimizer
from data_parallel.uneven import Shadow
from sparse_collectives import ALGORITHMS
from sparse_collectives.algorithms.gtopk import GTopK
from sparse_compress import TopK, topk
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig

pytestmark = pytest.mark.quick

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


class Weights(nn.Module):
    """Parameters a, b, …; the gradients are what `backward` is given."""

    def __init__(self, *shapes, dtype=torch.float32):
        super().__init__()
        for name, shape in zip("abcdef", shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def backward(self, **gradients):
        sum((getattr(self, name) * torch.as_tensor(g)).sum() for name, g in gradients.items()).backward()


def sgd(model, comm=None, lr=1.0, **options):
    return DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), comm=comm, **options
    )


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train_linear(comm, steps=4, seed=None, **options):
    """A small regression on data of this rank; its parameters."""
    torch.manual_seed(comm.rank if seed is None else seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = sgd(model, comm, lr=0.1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    return parameters(model)


def test_all_ranks_start_with_the_parameters_of_rank_0_frozen_ones_too():
    def body(comm):
        model = Weights(3, 2)
        model.b.requires_grad_(False)
        for p in model.parameters():
            p.data.fill_(comm.rank + 7)
        sgd(model, comm)
        return parameters(model)

    for result in SimulatedWorld(3).run(body):
        assert result["a"].tolist() == [7, 7, 7]
        assert result["b"].tolist() == [7, 7]


@pytest.mark.few(13)
@every_algorithm
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [None, 32])
def test_ranks_stay_alike_bit_for_bit(name, size, bucket_bytes):
    results = SimulatedWorld(size).run(lambda c: train_linear(c, algorithm=name, bucket_bytes=bucket_bytes))
    assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_at_density_1_is_the_wrapped_optimizer_in_bits(name):
    def plain(steps=4):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
        return parameters(model)

    [result] = SimulatedWorld(1).run(lambda c: train_linear(c, seed=3, algorithm=name, compressor=TopK(1.0)))
    assert same(result, plain())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_density_1_is_dense_within_rounding(name):
    def train(algorithm):
        return SimulatedWorld(4).run(lambda c: train_linear(c, algorithm=algorithm, compressor=TopK(1.0)))[0]

    torch.testing.assert_close(train(name), train("dense"))


def test_dense_puts_the_mean_into_the_gradients():
    def body(comm):
        model = Weights(3)
        optimizer = sgd(model, comm, algorithm="dense")
        model.backward(a=[1.0 * comm.rank, 2.0, 4.0])
        optimizer.step()
        return model.a.grad.tolist(), model.a.tolist()

    for gradient, weights in SimulatedWorld(4).run(body):
        assert gradient == [1.5, 2, 4]
        assert weights == [-1.5, -2, -4]


def test_learning_rate_schedulers_and_the_wrapped_optimizer_share_everything():
    model = Weights(3)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = DistributedOptimizer(inner, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    model.backward(a=[1.0, 1.0, 1.0])
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1)
    inner.load_state_dict(inner.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.state[model.a]["momentum_buffer"].any()
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_several_backwards_before_a_step_add_up():
    def body(comm):
        model = Weights(2)
        optimizer = sgd(model, comm, compressor=TopK(1.0))
        with optimizer.no_sync():
            model.backward(a=[1.0, 2.0])
            before = comm.bytes_sent
            with pytest.raises(RuntimeError, match=r"step\(\) inside no_sync\(\)"):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"synchronize\(\) inside no_sync\(\)"):
                optimizer.synchronize()
            assert comm.bytes_sent == before
        model.backward(a=[10.0, 20.0])
        optimizer.step()
        return model.a.tolist()

    assert SimulatedWorld(2).run(body) == [[-11, -22]] * 2


def test_clipping_between_synchronize_and_step():
    def body(comm):
        model = Weights(2)
        optimizer = sgd(model, comm, algorithm="dense")
        model.backward(a=[6.0 * comm.rank, 8.0 * comm.rank])
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sent = comm.bytes_sent
        optimizer.step()
        assert comm.bytes_sent == sent
        return norm.item(), model.a.tolist()

    for norm, weights in SimulatedWorld(2).run(body):
        assert norm == 5
        assert weights == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_synchronizing_twice_is_an_error_until_step_or_zero_grad():
    model = Weights(2)
    optimizer = sgd(model)
    model.backward(a=[1.0, 2.0])
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="called twice"):
        optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_backward_between_synchronize_and_step_is_an_error_on_every_rank(overlap):
    """It was a step by the mean and each rank's own gradient, so that ranks went apart in silence."""

    def body(comm):
        model = nn.Linear(3, 1)
        optimizer = sgd(model, comm, overlap=overlap)

        def backward():
            model(torch.full((1, 3), 1.0 + comm.rank)).sum().backward()

        backward()
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match=r"adds this rank's own gradient to the mean.*optimizer\.zero_grad"):
            backward()
        model.zero_grad()
        with optimizer.no_sync(), pytest.raises(RuntimeError, match="adds this rank's own gradient"):
            backward()
        optimizer.zero_grad()
        for _ in range(2):
            backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
        backward()
        optimizer.step()
        return parameters(model)

    one, other = SimulatedWorld(2).run(body)
    assert same(one, other)


def test_parameter_groups_keep_their_settings():
    def body(comm):
        model = Weights(1, 1)
        groups = [{"params": [model.a], "lr": 1.0}, {"params": [model.b], "lr": 10.0, "weight_decay": 0.5}]
        optimizer = DistributedOptimizer(
            torch.optim.SGD(groups, lr=9.0), model.named_parameters(), comm=comm, compressor=TopK(1.0)
        )
        model.backward(a=[1.0], b=[1.0])
        optimizer.step()
        return model.a.item(), model.b.item()

    assert SimulatedWorld(2).run(body) == [(-1, -10)] * 2


@every_algorithm
def test_a_parameter_that_only_one_rank_used_is_updated_on_all(name):
    def body(comm):
        model = Weights(2, 2, 1)
        optimizer = sgd(model, comm, algorithm=name, compressor=TopK(1.0))
        model.backward(a=[4.0, 4.0], **({"b": [2.0, 8.0]} if comm.rank == 1 else {}))
        optimizer.step()
        return model.a.tolist(), model.b.tolist(), model.c.grad.tolist()

    assert SimulatedWorld(2).run(body) == [([-4, -4], [-1, -4], [0])] * 2


def test_frozen_and_empty_parameters_are_left_out():
    def body(comm):
        model = Weights(4, 4, 0)
        model.b.requires_grad_(False)
        optimizer = DistributedOptimizer(
            torch.optim.SGD([model.a, model.c], lr=1.0), model.named_parameters(), comm=comm, compressor=TopK(1.0)
        )
        model.backward(a=[1.0, 2.0, 3.0, 4.0])
        before = comm.bytes_sent
        optimizer.step()
        assert model.b.grad is None
        return comm.bytes_sent - before

    assert SimulatedWorld(2).run(body) == [16 + 4 * 4] * 2  # a header, and all four: no indices


@pytest.mark.parametrize("kind", [DistributedOptimizer, UpdateOptimizer])
@pytest.mark.parametrize("inner", [torch.optim.Adam, torch.optim.SGD])
def test_nothing_to_train_is_an_error_at_once(inner, kind):
    model = Weights(4, 0)
    model.a.requires_grad_(False)
    with pytest.raises(ValueError, match=r"of the 2 parameters .* 1 frozen, 1 empty: .*requires_grad_\(True\)"):
        kind(inner(model.parameters(), lr=1.0), model.named_parameters())


@every_algorithm
def test_mixed_dtypes_each_have_a_bucket_and_keep_their_dtype(name):
    def body(comm):
        model = Weights(2, 2, 2)
        model.b.data, model.c.data = model.b.data.bfloat16(), model.c.data.double()
        optimizer = sgd(model, comm, algorithm=name, compressor=TopK(1.0))
        wide = 1 + 2.0**-40
        model.backward(
            a=[1.0, 2.0], b=torch.tensor([3.0, 4.0]).bfloat16(), c=torch.tensor([wide, 1.0], dtype=torch.float64)
        )
        optimizer.step()
        return [(p.dtype, p.tolist()) for p in model.parameters()]

    for a, b, c in SimulatedWorld(4).run(body):
        assert a == (torch.float32, [-1, -2])
        assert b == (torch.bfloat16, [-3, -4])
        assert c == (torch.float64, [-1 - 2.0**-40, -1])


def test_a_closure_is_called_once_before_the_exchange():
    def body(comm):
        model, calls = Weights(1), []
        optimizer = sgd(model, comm, compressor=TopK(1.0))

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            model.backward(a=[2.0 * comm.rank])
            return 0.25

        with torch.no_grad():
            loss = optimizer.step(closure)
        model.backward(a=[1.0])
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match="closure"):
            optimizer.step(closure)
        return loss, len(calls), model.a.item()

    assert SimulatedWorld(2).run(body) == [(0.25, 1, -1)] * 2


def test_zero_grad_by_value_and_by_none():
    model = Weights(1)
    optimizer = sgd(model)
    model.backward(a=[1.0])
    optimizer.zero_grad(set_to_none=False)
    assert model.a.grad.tolist() == [0]
    optimizer.zero_grad()
    assert model.a.grad is None


def test_momentum_is_applied_before_the_selection_and_cleared_where_sent():
    """u ← m·u + g; v ← v + u; send the largest of v; clear u and v there."""
    model = Weights(2)
    optimizer = sgd(model, compressor=TopK(0.5), momentum=0.5)
    steps = []
    for gradient in ([4.0, 3.0], [0.0, 1.0], [0.0, 0.0]):
        optimizer.zero_grad()
        model.backward(a=gradient)
        optimizer.step()
        steps.append(model.a.grad.tolist())
    # u: (4, 3) → (0, 3); (0, 2.5) → (0, 0), v: (0, 3) → (0, 5.5) → sent; then nothing is left
    assert steps == [[4, 0], [0, 5.5], [0, 0]]


def test_momentum_on_both_sides_is_warned_about():
    model = Weights(2)
    with pytest.warns(UserWarning, match="momentum is on twice"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0, 0.9), model.named_parameters(), momentum=0.9)


def test_an_algorithm_that_prescribes_its_selection_replaces_the_compressor_and_keeps_a_state(monkeypatch):
    class UpperHalf(GTopK):
        name = "upper half"

        def select(self, like, rank, size, k, state):
            assert (like.shape, rank, size, k) == ((4,), 0, 1, 2)
            return lambda acc: topk(torch.cat([torch.zeros(2), acc[2:]]), k)

        def schedule(self, sparse, rank, size, k, state=None):
            state["steps"] = state.get("steps", 0) + 1
            return (yield from super().schedule(sparse, rank, size, k))

        def initial_state(self):
            return {}

    monkeypatch.setitem(ALGORITHMS, "upper half", UpperHalf())
    model = Weights(4)
    optimizer = sgd(model, algorithm="upper half", compressor=TopK(0.5))
    model.backward(a=[9.0, 9.0, 1.0, 2.0])
    optimizer.step()
    assert model.a.tolist() == [0, 0, -1, -2]
    assert optimizer.state_dict()["distributed"]["algorithm_state"] == [("a", {"steps": 1})]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"algorithm": "top"}, ValueError, "known: dense, topk-allgather, topk-dsa, gtopk"),
        ({"nonfinite": "ignore"}, ValueError, "expected 'raise' or 'skip'"),
        ({"algorithm": "dense", "momentum": 0.9}, ValueError, "belongs into the optimizer"),
        ({"momentum": 1.0}, ValueError, "momentum is 1.0"),
        ({"bucket_bytes": 0}, ValueError, "expected None or a number of bytes, 1 or more"),
    ],
)
def test_wrong_settings(options, error, says):
    with pytest.raises(error, match=says):
        sgd(Weights(2), **options)


def test_no_optimizer_at_all():
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
        DistributedOptimizer(Weights(1), [])


def test_groups_cannot_be_added_later():
    optimizer = sgd(Weights(1))
    with pytest.raises(RuntimeError, match="make a new DistributedOptimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_sparse_gradient_is_told_by_name():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = sgd(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="the gradient of 'weight' has layout"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (lambda rank: {"algorithm": "gtopk" if rank else "dense"}, "dense"),
        (lambda rank: {"nonfinite": "skip" if rank else "raise"}, "nonfinite='skip'"),
        (lambda rank: {"shape": 3 + rank}, "parameters of 4 elements"),
    ],
)
def test_ranks_that_disagree_are_told_at_construction(settings, says):
    told = []

    def body(comm):
        options = settings(comm.rank)
        model = Weights(options.pop("shape", 3))
        with pytest.raises(RuntimeError, match="ranks disagree") as error:
            sgd(model, comm, **options)
        told.append(str(error.value))

    SimulatedWorld(2).run(body)
    assert told[0] == told[1]
    assert says in told[0]


def test_what_depends_on_the_shape_alone_is_prepared_once():
    """Names are looked up, and settings checked, when the optimizer is made; a step asks of its own bucket only."""
    entered = set()

    def watch(frame, event, argument):
        entered.add(frame.f_code.co_qualname)

    model = nn.ParameterDict({key: nn.Parameter(torch.zeros(40)) for key in "abc"})
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=Alone(), bucket_bytes=100)
    for step in range(3):
        for p in model.values():
            p.grad = torch.ones(40)
        sys.setprofile(watch if step == 2 else None)
        optimizer.step()
    sys.setprofile(None)
    assert "SparseLane.send" in entered
    looked_up = {"wire_named", "resolve", "_known", "check_options", "Algorithm.settings", "Algorithm.options"}
    assert not entered & looked_up
    assert "ErrorFeedback.suspects" not in entered  # which reads the flags of all buckets


def test_who_joins_last_gives_all_its_parameters_and_state():
    """As torch's `Join` ends. Numbers, masks and None, too, by parameter: none of those that it has no state of."""

    def body(comm):
        model = Weights(3, 2)
        optimizer = sgd(model, comm)
        with torch.no_grad():
            model.a.fill_(comm.rank)
        own = {"count": comm.rank, "mask": torch.tensor([comm.rank]), "mean": torch.tensor([0.5 + comm.rank])}
        optimizer.state[model.a if comm.rank else model.b] = {**own, "unset": None}
        Shadow(optimizer).post_hook(is_last_joiner=comm.rank == 1)
        return model.a.tolist(), model.b not in optimizer.state, dict(optimizer.state[model.a])

    kept = {"count": 1, "mask": torch.tensor([1]), "mean": torch.tensor([1.5]), "unset": None}
    assert SimulatedWorld(3).run(body) == [([1.0] * 3, True, kept)] * 3


@pytest.mark.parametrize("ends", [True, False])
def test_ranks_at_other_rates_are_an_error_where_no_rank_finishes_before_others(ends):
    """After torch's `Join`, which ends with the last one's numbers everywhere, or in one that raises at once."""

    def body(comm):
        model = Weights(3)
        optimizer = sgd(model, comm, algorithm="dense")
        group = optimizer.param_groups[0]
        group.update(lr=0.5 ** (1 + comm.rank), betas=(0.1 * comm.rank, 0.9), note=object())
        optimizer.shadow = Shadow(optimizer)  # as `Join` asks for it
        optimizer._join_config = _JoinConfig(True, throw_on_early_termination=not ends, is_first_joinable=False)
        if ends:
            optimizer.shadow.post_hook(is_last_joiner=comm.rank == 1)
            assert (group["lr"], group["betas"]) == (0.25, (0.1, 0.9))
            optimizer.step()
            group["lr"] *= 1 + comm.rank
        for _ in range(100):
            optimizer.step()

    with pytest.raises(CollectiveError, match=r"parameter groups of lr 0\.\d+"):
        SimulatedWorld(2).run(body)


@pytest.mark.parametrize("steps", [(3, 4), (0, 2), (2, 0), (3, 3)])
def test_moments_of_parameters_that_a_rank_alone_uses_stay_by_parameter(steps):
    """Under torch's `Join`, also where a rank has no input at all."""

    def body(comm):
        model = Weights(3, 3)
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = UpdateOptimizer(inner, model.named_parameters(), comm=comm, density=1.0)
        shadow, last = Shadow(optimizer), steps[comm.rank] == max(steps)
        for step in range(max(steps)):
            if step < steps[comm.rank]:
                optimizer.zero_grad()
                model.backward(**{"ab"[comm.rank]: [1.0, 2.0, 3.0 + comm.rank]})
                optimizer.step()
            else:
                shadow.main_hook()
        own = copy.deepcopy(inner.state_dict()["state"])
        shadow.post_hook(is_last_joiner=last)
        ends = copy.deepcopy(inner.state_dict()["state"])
        optimizer.zero_grad()
        model.backward(a=1.0, b=1.0)
        optimizer.step()
        return own, ends, parameters(model)

    told = SimulatedWorld(2).run(body)
    source = steps.index(max(steps))
    assert list(told[source][0]) == [source]
    assert str(told[0][1]) == str(told[1][1]) == str(told[source][0])
    assert same(told[0][2], told[1][2])
