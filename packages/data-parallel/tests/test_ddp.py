"""The hook under DistributedDataParallel, on a group of one rank; tests-integration has the laws on several."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from communicators import CollectiveError
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer, sparse_hook
from data_parallel.integrations.attaching import hooked, left_to_optimizers
from data_parallel.settings import scheduled
from sparse_compress import TopK, WarmUp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(named=True, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    names = {"named_parameters": model.named_parameters()} if named else {}
    return model, SparseHookState(density=0.1, **{**names, **settings})


def wrapped(model, state, **options):
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)  # several buckets
    ddp.register_comm_hook(state, sparse_hook)
    return ddp


def backward(ddp, seed, factor=1.0):
    ddp.zero_grad()
    inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)) * factor
    ddp(inputs).square().sum().backward()


def residuals(state):
    return {name: kept.clone() for name, kept in state.state_dict()["distributed"]["residuals"].items()}


@pytest.mark.parametrize("dense_below", [0, 7, 99])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_an_error_comes_out_of_backward_as_itself_and_the_next_backward_is_fine(options, dense_below):
    """DDP makes a RuntimeError of what a hook's future raises, with the text of every callback on its way."""
    model, state = made(dense_below=dense_below)
    ddp = wrapped(model, state, **options)
    for step, factor in enumerate([1.0, float("nan"), 1.0, 1.0, float("nan"), 1.0]):
        if factor == 1.0:
            backward(ddp, step)
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        else:
            with pytest.raises(CollectiveError, match=r"^rank 0: the gradient of '.*' is not finite") as raised:
                backward(ddp, step, factor)
            assert "\n" not in str(raised.value)


def test_errors_of_two_modules_in_one_backward_do_not_return_in_the_next():
    """What one module raises ends autograd's final callbacks, so that the other's is not called."""
    models = [wrapped(*made()), wrapped(*made())]

    def joint(factor):
        for ddp in models:
            ddp.zero_grad()
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * factor
        sum(ddp(inputs).square().sum() for ddp in models).backward()

    for factor in [1.0, float("nan"), 1.0, float("nan"), 1.0]:
        if factor == 1.0:
            joint(factor)
        else:
            with pytest.raises(CollectiveError, match="is not finite"):
                joint(factor)


class Checkpointed(nn.Module):
    """Runs one of three linear layers again in an inner backward."""

    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.layers = inner, nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, inputs):
        inputs = inputs.requires_grad_()
        for at, layer in enumerate(self.layers):
            inputs = checkpoint(layer, inputs, use_reentrant=True) if at == self.inner else layer(inputs)
        return inputs


@pytest.mark.parametrize("inner", [0, 1, 2])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_an_error_waits_for_the_last_bucket_where_a_checkpoint_has_a_backward_of_its_own(inner, bad, options):
    """Raised at the end of the inner backward, it would break off DDP's."""
    model = Checkpointed(inner)
    ddp = wrapped(model, SparseHookState(density=0.1, named_parameters=model.named_parameters()), **options)
    factor = 1.0
    model.layers[bad].bias.register_hook(lambda grad: grad * factor)
    for step, factor in enumerate([1.0, float("nan"), 1.0, 1.0, float("nan"), 1.0]):
        if factor == 1.0:
            backward(ddp, step)
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        else:
            with pytest.raises(CollectiveError, match=rf"^rank 0: the gradient of 'layers.{bad}.bias' is not finite"):
                backward(ddp, step)


def test_a_layer_is_frozen_half_way_and_trained_again():
    """With a new DDP and the same state: what waits of it goes on waiting, is saved, and is sent when it is trained."""
    for named in (True, False):
        model, state = made(named=named, momentum=0.5)
        ddp = wrapped(model, state)
        for step in range(3):
            backward(ddp, step)
        before = residuals(state)
        frozen = {name for name, residual in before.items() if residual.shape[0] == 4}  # the layer in the middle
        model[2].requires_grad_(False)
        ddp = wrapped(model, state)
        for step in range(3, 6):
            backward(ddp, step)
        resting = residuals(state)
        assert all(torch.equal(resting[name], before[name]) for name in frozen)
        copies = copy.deepcopy(ddp)._comm_hooks[0][1]
        assert all(torch.equal(kept, resting[name]) for name, kept in residuals(copies).items())
        model[2].requires_grad_(True)
        ddp = wrapped(model, state)
        for step in range(6, 9):
            backward(ddp, step)
        assert not any(torch.equal(kept, resting[name]) for name, kept in residuals(state).items() if name in frozen)


def test_a_run_with_a_frozen_layer_is_resumed():
    """Saved before it was frozen, and after: what waits of it is loaded, and is not lost when that is saved again."""
    model, state = made(momentum=0.5)
    ddp = wrapped(model, state)
    for step in range(3):
        backward(ddp, step)
    for freeze in (False, True):
        model[2].requires_grad_(not freeze)
        ddp = wrapped(model, state)
        for step in range(3, 6):
            backward(ddp, step)
        saved, (other, resumed) = copy.deepcopy(state.state_dict()), made(momentum=0.5)
        before = saved["distributed"]["residuals"]
        other.load_state_dict(model.state_dict())
        other[2].requires_grad_(False)
        resumed.load_state_dict(saved)
        backward(wrapped(other, resumed), 6)
        resting = residuals(resumed)
        assert all(torch.equal(resting[name], before[name]) for name in ("2.weight", "2.bias"))
    wrong = {**before, "2.bias": torch.ones(3)}
    with pytest.raises(ValueError, match=r"of other shapes than the parameters: \['2.bias: \(3,\), not \(4,\)'\]"):
        resumed.load_state_dict({"distributed": {**saved["distributed"], "residuals": wrong}})


@pytest.mark.parametrize("way", ["for_model", "by hand"])
def test_a_state_of_a_compiled_model_is_one_of_the_plain_model_and_back(way):
    def training(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        if compiled == "a part":
            model[0] = torch.compile(model[0], backend="eager")
        ddp = DistributedDataParallel(torch.compile(model, backend="eager") if compiled == "whole" else model)
        if way == "for_model":
            return ddp, SparseHookState.for_model(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), density=0.1)
        ddp.register_comm_hook(state := SparseHookState(named_parameters=ddp, density=0.1), sparse_hook)
        return ddp, state

    saved = []
    for compiled in ("", "a part", "whole"):
        ddp, state = training(compiled)
        backward(ddp, 0)
        saved.append(copy.deepcopy(state.state_dict()))
    for compiled in ("", "a part", "whole"):
        for kept in saved:
            ddp, state = training(compiled)
            state.load_state_dict(kept)
            before = kept["distributed"]["residuals"]
            assert before.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
            assert all(torch.equal(now, before[name]) for name, now in residuals(state).items())


def test_a_layer_that_is_trained_again_without_a_new_ddp_is_named():
    model, state = made()
    backward(wrapped(model, state), 0)
    model[2].requires_grad_(False)
    ddp = wrapped(model, state)
    backward(ddp, 1)
    model[2].requires_grad_(True)
    with pytest.raises(ValueError, match=r"DDP does not bring: \['2.bias', '2.weight'\]\. After requires_grad_"):
        backward(ddp, 2)


def ignoring(ways, said="by torch"):
    """A module of which DDP is told to leave a layer alone, which may differ between ranks; its state in one way."""
    model, _ = made()
    names = ["2.weight", "2.bias"]
    if said == "by torch":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    else:
        model._ddp_params_and_buffers_to_ignore = names
    ddp = DistributedDataParallel(model)
    if ways == "for_model":
        return ddp, SparseHookState.for_model(ddp, sgd(groups_of(model)), density=lambda step: 0.1)
    if ways == "hooked":
        return ddp, hooked(ddp, [], {"density": 0.1}, grad_scaler=None, how="")
    state = SparseHookState(density=0.1, named_parameters=ddp if ways == "given DDP" else model.named_parameters())
    ddp.register_comm_hook(state, sparse_hook)
    return ddp, state


def groups_of(model):
    """Parameter groups of all but the layer that is ignored, and of that layer."""
    return [{"params": [*model[0].parameters(), *model[4].parameters()]}, {"params": [*model[2].parameters()]}]


@pytest.mark.parametrize(
    ("ways", "said"),
    [("by hand", "by torch"), *((w, s) for w in ("for_model", "hooked", "given DDP") for s in ("by torch", "by hand"))],
)
def test_a_layer_that_ddp_ignores_has_no_part_in_the_state_and_none_in_a_resume(ways, said):
    ddp, state = ignoring(ways, said)
    backward(ddp, 0)
    assert residuals(state).keys() == {"0.weight", "0.bias", "4.weight", "4.bias"}
    other, resumed = ignoring(ways, said)
    resumed.load_state_dict(state.state_dict())
    backward(ddp, 1)
    backward(other, 1)
    assert residuals(state).keys() == residuals(resumed).keys()


@pytest.mark.parametrize("ways", ["for_model", "hooked", "by hand"])
def test_a_layer_that_another_ddp_ignores_has_its_part_in_the_state_of_its_own(ways):
    """As experts do that are in a DDP of their own, among fewer ranks; torch's mark on them stays."""
    ddp, _ = ignoring("for_model")
    experts = DistributedDataParallel(ddp.module[2])
    if ways == "for_model":
        state = SparseHookState.for_model(experts, sgd(groups_of(ddp.module)), density=0.1)
    elif ways == "hooked":
        state = hooked(experts, [], {"density": 0.1}, grad_scaler=None, how="")
    else:
        state = SparseHookState(density=0.1, clip_norm=1.0, named_parameters=experts.module.named_parameters())
        experts.register_comm_hook(state, sparse_hook)
    experts(torch.ones(1, 6)).sum().backward()
    assert residuals(state).keys() == {"weight", "bias"}


def test_a_mark_of_an_earlier_ddp_leaves_nothing_out_where_the_state_is_given_its_own():
    """Given pairs, the error names the remedy."""

    def again():
        ddp, _ = ignoring("for_model")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ddp.module, [])
        return ddp.module, DistributedDataParallel(ddp.module)

    model, ddp = again()
    ddp.register_comm_hook(SparseHookState(density=0.1, named_parameters=model.named_parameters()), sparse_hook)
    with pytest.raises(ValueError, match=r"not among named_parameters.* or the DDP module itself"):
        backward(ddp, 0)
    model, ddp = again()
    state = SparseHookState.for_model(ddp, sgd(model.parameters()), density=0.1)
    backward(ddp, 0)
    assert residuals(state).keys() == dict(model.named_parameters()).keys()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.own = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return inputs * self.scale * self.own


def test_the_state_has_what_the_reducer_brings_not_what_its_names_say():
    """Of a parameter of the module itself the reducer goes by the name ".own"."""
    for name, brought in (("own", {"scale", "own"}), (".own", {"scale"})):
        model = Scaled()
        model._ddp_params_and_buffers_to_ignore = [name]
        ddp = DistributedDataParallel(model)
        state = SparseHookState(density=0.1, named_parameters=ddp)
        ddp.register_comm_hook(state, sparse_hook)
        ddp(torch.ones(2, 3)).sum().backward()
        assert residuals(state).keys() == brought


@pytest.mark.filterwarnings("error:momentum is on twice")
def test_for_model_leaves_the_group_of_ignored_parameters_alone():
    """They trained without momentum, and with ten times the weight decay."""
    model, _ = made()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
    ddp, optimizer = DistributedDataParallel(model), sgd(groups_of(model), weight_decay=1e-4)
    SparseHookState.for_model(ddp, optimizer, density=0.1)
    said = [(group["momentum"], group["weight_decay"]) for group in optimizer.param_groups]
    assert said == [(0.0, pytest.approx(1e-3)), (0.9, 1e-4)]
    for step in range(9):
        backward(ddp, step)
        optimizer.step()
    again = SparseHookState.for_model(DistributedDataParallel(model), optimizer, density=0.1)
    assert again._settings.momentum == 0.9
    assert said == [(group["momentum"], group["weight_decay"]) for group in optimizer.param_groups]


def test_for_model_refuses_ignored_parameters_in_a_group_with_others_and_changes_nothing():
    model, _ = made()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
    ddp, optimizer = DistributedDataParallel(model), sgd(model.parameters(), weight_decay=1e-4)
    with pytest.raises(
        ValueError, match=r"\['2.weight', '2.bias'\], which DDP ignores.*a parameter group of their own"
    ):
        SparseHookState.for_model(ddp, optimizer)
    assert [optimizer.param_groups[0][key] for key in ("momentum", "weight_decay")] == [0.9, 1e-4]
    with pytest.raises(ValueError, match="none of the optimizer's parameters is the model's"):
        SparseHookState.for_model(ddp, sgd(model[2].parameters()))
    model[2].requires_grad_(False)  # so that they need no momentum
    SparseHookState.for_model(ddp, optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.0


def by_hook(inner, **settings):
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    ddp, optimizer = DistributedDataParallel(model), inner(model.parameters())
    return ddp, optimizer, SparseHookState.for_model(ddp, optimizer, **settings)


def sgd(parameters, **changes):
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **changes})


def test_for_model_is_the_lines_that_were_written_by_hand():
    def steps(ddp, optimizer):
        for step in range(12):
            backward(ddp, step)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in ddp.parameters()])

    torch.manual_seed(0)
    ddp, optimizer, _ = by_hook(sgd, steps=20, density=0.1, algorithm="spardl")
    assert optimizer.param_groups[0]["momentum"] == 0
    ours = steps(ddp, optimizer)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    hand, names = DistributedDataParallel(model), model.named_parameters()
    density = WarmUp(0.1, 2, stages=(1.0,))
    state = SparseHookState(density=density, algorithm="spardl", momentum=0.9, named_parameters=names)
    hand.register_comm_hook(state, sparse_hook)
    assert torch.equal(ours, steps(hand, sgd(hand.parameters(), momentum=0.0)))


def test_for_model_leaves_momentum_where_all_is_sent():
    for algorithm in ("dense", "dense-int8", "powersgd"):
        _, optimizer, _ = by_hook(sgd, algorithm=algorithm)
        assert optimizer.param_groups[0]["momentum"] == 0.9
    by_hook(torch.optim.AdamW, algorithm="powersgd")


@pytest.mark.parametrize(
    ("inner", "error", "said"),
    [
        (torch.optim.AdamW, ValueError, "the optimizer is AdamW, which learns badly"),
        (lambda parameters: sgd(parameters, nesterov=True), ValueError, "Nesterov's momentum and dampening"),
        (lambda parameters: sgd(parameters, dampening=0.1), ValueError, "Nesterov's momentum and dampening"),
        (
            lambda parameters: sgd([{"params": list(parameters)[:2]}, {"params": [], "momentum": 0.5}]),
            ValueError,
            r"groups have the momenta \[0.5, 0.9\]",
        ),
    ],
)
def test_for_model_refuses_what_would_learn_badly_and_changes_nothing(inner, error, said):
    made = []

    def kept(parameters):
        made.append(inner(parameters))
        return made[0]

    with pytest.raises(error, match=said):
        by_hook(kept)
    assert [group.get("momentum") for group in made[0].param_groups] == [
        group.get("momentum") for group in inner(nn.Linear(2, 2).parameters()).param_groups
    ]


def test_for_model_keeps_the_strength_of_weight_decay():
    """Which is a gradient that momentum would have taken ten times."""
    _, optimizer, _ = by_hook(lambda parameters: sgd(parameters, weight_decay=0.25, momentum=0.75))
    assert optimizer.param_groups[0]["weight_decay"] == 1.0
    for given in ({"algorithm": "dense"}, {"momentum": 0.0}):
        _, optimizer, _ = by_hook(lambda parameters: sgd(parameters, weight_decay=0.25), **given)
        assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_for_model_finds_the_momentum_that_another_for_model_has_moved():
    ddp, optimizer, state = by_hook(lambda parameters: sgd(parameters, weight_decay=0.01))
    decay, loaded = optimizer.param_groups[0]["weight_decay"], sgd(ddp.parameters(), weight_decay=0.01)
    loaded.load_state_dict(optimizer.state_dict())
    for again in (optimizer, loaded):
        made = SparseHookState.for_model(DistributedDataParallel(ddp.module), again)
        assert made._settings.momentum == state._settings.momentum == 0.9
        assert again.param_groups[0]["weight_decay"] == decay


@pytest.mark.filterwarnings("error:momentum is on twice")
@pytest.mark.parametrize("resumed", [False, True])
def test_a_group_that_is_added_after_for_model_is_treated_as_the_others(resumed):
    """A layer that learns from half way on: the bits are those of a state and an SGD that were set by hand."""

    def trained(by_hand):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model)
        given = {"weight_decay": 0.1, "momentum": 0.0} if by_hand else {"weight_decay": 0.025, "momentum": 0.75}
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05, **given)
        if resumed and not by_hand:
            saved = {"weight_decay": 0.1, "momentum": 0.0}
            optimizer.load_state_dict(torch.optim.SGD(model[2].parameters(), lr=0.05, **saved).state_dict())
        if by_hand:
            state = SparseHookState(density=0.1, momentum=0.75, named_parameters=ddp)
            ddp.register_comm_hook(state, sparse_hook)
        else:
            state = SparseHookState.for_model(ddp, optimizer, density=lambda step: 0.1)
        for step in range(16):
            if step == 8:
                model[0].requires_grad_(True)
                ddp = DistributedDataParallel(model)
                ddp.register_comm_hook(state, sparse_hook)
                optimizer.add_param_group({"params": [*model[0].parameters()]})
            optimizer.zero_grad()
            ddp(torch.full((4, 8), step / 8)).square().mean().backward()
            optimizer.step()
        settings = [(group["momentum"], round(group["weight_decay"], 9)) for group in optimizer.param_groups]
        return settings, torch.cat([p.detach().flatten() for p in model.parameters()])

    (settings, bits), (by_hand, expected) = trained(False), trained(True)
    assert settings == by_hand == [(0.0, 0.1)] * 2
    assert torch.equal(bits, expected)


def test_for_model_finds_the_momentum_of_groups_too():
    ddp, optimizer, _ = by_hook(
        lambda parameters: torch.optim.SGD([{"params": [*parameters], "momentum": 0.9}], lr=0.1)
    )
    assert SparseHookState.for_model(DistributedDataParallel(ddp.module), optimizer)._settings.momentum == 0.9


@pytest.mark.parametrize("through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_another_for_model_finds_the_momentum_in_a_copy_too(through):
    ddp, optimizer, _ = by_hook(sgd)
    model, optimizer = through((ddp.module, optimizer))
    assert optimizer.param_groups[0]["momentum"] == 0.0
    state = SparseHookState.for_model(DistributedDataParallel(model), optimizer)
    assert state._settings.momentum == 0.9


def test_for_model_refuses_the_optimizer_of_another_model():
    ddp, other = DistributedDataParallel(nn.Linear(2, 2)), sgd(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="none of the optimizer's parameters is the model's"):
        SparseHookState.for_model(ddp, other)
    assert other.param_groups[0]["momentum"] == 0.9


def test_for_model_warms_up_to_what_a_compressor_sends():
    _, _, state = by_hook(sgd, steps=50, compressor=TopK(0.2))
    assert state._settings.density == WarmUp.recommended(0.2, 50)
    assert scheduled(None, 50, SimpleNamespace()) is None


def test_for_model_warms_powersgd_up_in_a_tenth_of_the_steps():
    for steps, options, dense in ((50, {}, 5), (None, {}, 100), (50, {"dense_steps": 7, "rank": 1}, 7)):
        _, _, state = by_hook(sgd, steps=steps, algorithm="powersgd", options=options)
        assert state._settings.entry.dense_steps == dense


def test_a_grad_scaler_that_is_not_enabled_is_none():
    """A NaN went into all parameters: nobody skips the step."""
    model, state = made(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(CollectiveError, match="not finite"):
        backward(wrapped(model, state), 0, float("nan"))


def test_residuals_that_were_loaded_count_before_the_first_step():
    model, state = made()
    backward(wrapped(model, state), 0)
    other = SparseHookState(density=0.1, named_parameters=model.named_parameters())
    other.load_state_dict(state.state_dict())
    assert other.stats()["residual_norm"] == pytest.approx(state.stats()["residual_norm"])
    assert state.stats()["residual_norm"] > 0


def test_a_mean_that_is_all_zeros_does_not_end_a_step():
    """Of parameters without a selected entry; each backward of a step counted as one."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 2))
    state = SparseHookState(density=1e-4, named_parameters=model.named_parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, sparse_hook)
    for step in range(4):
        for part in range(2):
            ddp(torch.randn(5, 8, generator=torch.Generator().manual_seed(2 * step + part))).square().sum().backward()
        assert not model[0].weight.grad.any()
        ddp.zero_grad(set_to_none=bool(step % 2))
    assert state.stats()["steps"] == 4


def test_for_model_is_for_a_module_in_ddp():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="ddp is a Linear, expected a DistributedDataParallel"):
        SparseHookState.for_model(model, sgd(model.parameters()))


def test_a_backward_that_breaks_off_does_not_save_a_part_of_the_buckets():
    """A run that goes on from such a state has other bits than one that never stopped."""
    model, state = made()
    ddp = wrapped(model, state)
    for step in range(3):
        backward(ddp, step)
    layout = state.state_dict()["distributed"]["buckets"]
    assert len(layout) == 2

    def break_off(_):
        raise KeyboardInterrupt

    handle = model[0].weight.register_hook(break_off)  # the last bucket's
    with pytest.raises(KeyboardInterrupt):
        backward(ddp, 3)
    handle.remove()
    assert state.state_dict()["distributed"]["buckets"] == layout


def test_each_bucket_is_saved_once_however_many_steps_there_were():
    model, state = made()
    ddp = wrapped(model, state)
    for step in range(4):
        backward(ddp, step)
    names = [name for bucket in state.state_dict()["distributed"]["buckets"] for name in bucket]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_gradients_of_several_backwards_add_up():
    """Each is exchanged, without those before it; where all is sent they are the model's own."""
    model, _ = made()
    alone = copy.deepcopy(model)
    ddp = wrapped(model, SparseHookState(named_parameters=model.named_parameters(), density=1.0))
    for seed in range(3):
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
        for one in (ddp, alone):
            one(inputs).square().sum().backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_state_of_the_default_group_is_a_file_and_of_another_one_is_none():
    """In another process there is a default group again, and no other."""
    for group in (None, dist.group.WORLD):
        _, state = made(process_group=group)
        assert pickle.loads(pickle.dumps(state)).comm.size == 1
    _, other = made(process_group=dist.new_group([0]))
    with pytest.raises(RuntimeError, match="of another process group than the default one is no file"):
        pickle.dumps(other)


def exchanging(model, kind=DistributedOptimizer):
    return kind(sgd(model.parameters(), momentum=0.0), model.named_parameters())


def prepared(model):
    """As a framework wraps it."""
    return SimpleNamespace(optimizer=exchanging(model, UpdateOptimizer))


@pytest.mark.parametrize("other", [exchanging, prepared])
def test_the_hook_exchanges_for_plain_optimizers_alone(other):
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="exchanges by itself: take DistributedOptimizers"):
        hooked(ddp, [sgd(ddp.module.parameters()), other(ddp.module)], {}, grad_scaler=None, how="")
    state = hooked(ddp, [sgd(ddp.module.parameters())], {"density": 0.5}, grad_scaler=None, how="")
    ddp(torch.ones(1, 3)).sum().backward()
    assert state.stats()["steps"] == 1
    again = hooked(ddp, [sgd(ddp.module.parameters())], {"density": 0.5}, grad_scaler=None, how="")
    assert again is state  # a second training, to which DDP would take no hook
    for wrong in ([other(ddp.module)], []):
        with pytest.raises(TypeError, match="exchanges by itself" if wrong else "an exchange with other settings"):
            hooked(ddp, wrong, {"density": 0.4}, grad_scaler=None, how="")
    with pytest.raises(TypeError, match="has a sparse hook already"):
        left_to_optimizers(ddp, [exchanging(ddp.module)], how="")
    copied = copy.deepcopy(ddp)
    assert hooked(copied, [], {"density": 0.5}, grad_scaler=None, how="") is not state


def test_a_single_update_optimizer_follows_the_module_in_ddp():
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ours = exchanging(ddp.module, UpdateOptimizer)
    for _ in range(2):
        left_to_optimizers(ddp, [ours], how="")
        loss = ddp(torch.ones(1, 3)).sum()
        assert ours.is_ahead
        with ours.ahead():
            loss.backward()
        assert ours.is_ahead
        ours.step()
        assert not ours.is_ahead


def test_ddp_leaves_the_exchange_to_optimizers_where_all_have_one():
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ours, theirs = exchanging(ddp.module), prepared(ddp.module)
    for optimizers in ([], [sgd(ddp.module.parameters())], [ours, sgd(ddp.module.parameters())]):
        with pytest.raises(TypeError, match="expected DistributedOptimizer or UpdateOptimizer for each"):
            left_to_optimizers(ddp, optimizers, how="")
    for _ in range(2):
        left_to_optimizers(ddp, [ours, theirs], how="")
    ddp(torch.ones(1, 3))
    assert not theirs.optimizer.is_ahead  # of several, each follows its own part
    overlapped = DistributedOptimizer(sgd(ddp.parameters(), momentum=0.0), ddp.named_parameters(), overlap=True)
    with pytest.raises(TypeError, match="take overlap=False, or SparseGradients"):
        left_to_optimizers(ddp, [overlapped], how="")
