"""Legal states that are loaded, and errors that are not a state's."""

import copy
from enum import Enum
from functools import partial

import pytest
import torch
from communicators import SimulatedWorld
from partial_collectives import EagerSGD
from replicas import (
    broadcast_state,
    check_like,
    check_loaded,
    foreseen_state,
    is_dense,
    load_into,
    saved_optimizer,
    wholly,
)
from torch.optim import lr_scheduler


def inner(**options):
    model = torch.nn.Linear(3, 2)
    return torch.optim.AdamW(model.parameters(), **options)


def sequence(optimizer):
    parts = lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)
    return lr_scheduler.SequentialLR(optimizer, list(parts), [3])


class Rate:
    def __call__(self, step):
        return 0.5


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")  # of torch 2.6
@pytest.mark.parametrize(
    "make",
    [
        sequence,
        lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 2), sequence(optimizer)]),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, Rate()),
        lr_scheduler.ReduceLROnPlateau,
    ],
)
def test_schedulers_load_their_own_states(make):
    saved, fresh = make(inner()), make(inner())
    for _ in range(5):
        saved.step(*([1.0] if isinstance(saved, lr_scheduler.ReduceLROnPlateau) else []))
    load_into(fresh, copy.deepcopy(saved.state_dict()))
    assert fresh.last_epoch == saved.last_epoch if hasattr(saved, "last_epoch") else fresh._last_lr == saved._last_lr


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"lr": torch.tensor(0.1)}])
def test_settings_may_be_others_than_when_it_was_saved(options):
    load_into(inner(**options), inner().state_dict())
    load_into(inner(), inner(**options).state_dict())


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_state_that_has_not_the_dtype_of_its_parameter_goes_on_with_the_same_bits(kind, dtype):
    """torch casts all state but a step to the parameter's dtype: NAdam's product of μ, and ASGD's η."""

    def made():
        p = torch.nn.Parameter(torch.linspace(1, 2, 5, dtype=dtype))
        return p, kind([p], lr=0.07)

    def train(p, optimizer, steps):
        for step in range(steps):
            p.grad = p.detach() + step
            optimizer.step()

    p, optimizer = made()
    train(p, optimizer, 3)
    fresh, loaded = made()
    load_into(loaded, optimizer.state_dict())
    with torch.no_grad():
        fresh.copy_(p)
    for name, held in optimizer.state[p].items():
        assert torch.equal(loaded.state[fresh][name], held), name
        assert loaded.state[fresh][name].dtype == held.dtype, name
    train(p, optimizer, 5)
    train(fresh, loaded, 5)
    assert torch.equal(fresh, p)


def late(kind, steps=0):
    """An optimizer of three parameters, of which the second has no gradient, and the third learns nothing."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4, 2), (5,))]
    parameters[2].requires_grad_(False)
    optimizer = kind(parameters, lr=0.1)
    for _ in range(steps):
        parameters[0].grad = torch.ones(2, 3)
        optimizer.step()
    return optimizer


def shapes(state):
    return {(p, name): getattr(v, "shape", None) for p, kept in state["state"].items() for name, v in kept.items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_a_state_has_all_that_a_template_has_and_loads_what_the_optimizer_had(kind):
    """Of a parameter without a gradient so far: torch.distributed.checkpoint refuses a file that lacks something."""
    kind = partial(kind, momentum=0.9) if kind is torch.optim.SGD else kind
    optimizer, fresh = late(kind, steps=3), late(kind)
    (state, held), (template, _) = (saved_optimizer(one, stepped=one is optimizer) for one in (optimizer, fresh))
    assert shapes(state) == shapes(template)
    assert {p for p, _ in shapes(state)} >= {0, 1}
    own = optimizer.state_dict()
    loaded = check_loaded({**state, "state": {str(p): kept for p, kept in state["state"].items()}}, held)
    assert shapes(loaded) == shapes(own)
    assert all(torch.equal(loaded["state"][p][name], own["state"][p][name]) for p, name in shapes(own))


def test_what_is_foreseen_of_one_parameter_copies_no_other():
    optimizer = late(torch.optim.AdamW, steps=1)
    first, second, _ = optimizer.param_groups[0]["params"]
    first.grad, second.grad, before = None, torch.ones(4, 2), copy.deepcopy(optimizer.state_dict())

    def refuse(*_):
        raise AssertionError("copied")

    first.__deepcopy__ = optimizer.state[first]["exp_avg"].__deepcopy__ = refuse
    assert list(foreseen_state(optimizer, of=[second])) == [1]
    assert second.grad.all()
    assert shapes(optimizer.state_dict()) == shapes(before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", "fast"),
        ("lr", [0.1]),
        ("betas", (0.9, "0.99")),
        ("betas", 0.9),
        ("betas", (0.9,)),
        ("fused", torch.zeros(2)),
    ],
)
def test_a_setting_that_is_none_of_its_kind_is_refused(key, value):
    state = inner(fused=False).state_dict()
    state["param_groups"][0][key] = value
    with pytest.raises(ValueError, match=f"a group of the wrapped optimizer, {key} is"):
        load_into(inner(fused=False), state)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_state_of_a_kind_that_torch_fills_in_is_refused(kind):
    fresh = kind([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"lacks \['amsgrad'.*, which a .*, and has .*'momentum_decay'\]"):
        load_into(fresh, torch.optim.NAdam([torch.nn.Parameter(torch.ones(2))]).state_dict())


def test_a_state_of_another_kind_is_not_called_damaged_alone():
    saved = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    saved.param_groups[0]["params"][0].grad = torch.ones(2)
    saved.step()
    fresh = torch.optim.NAdam([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"a NAdam does not find 'mu_product' in the state: .* kind of optimizer that"):
        load_into(fresh, saved.state_dict())


@pytest.mark.parametrize("error", [MemoryError, OSError, torch.OutOfMemoryError])
def test_errors_that_are_not_the_states_stay_what_they_are(error):
    with pytest.raises(error), wholly(inner(), "an optimizer", {"state": {}}):
        raise error("no room")


def test_a_state_that_comes_too_late_is_refused_and_training_goes_on():
    """Rounds go on in the background meanwhile: what they have come to must not be put back."""

    def body(comm):
        model = torch.nn.Linear(3, 2)
        optimizer = EagerSGD(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm)
        state = optimizer.state_dict()
        for step in range(8):
            comm.elapse(1.0 + comm.rank)
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            if comm.rank and step % 2:
                with pytest.raises(RuntimeError, match="after the first round"):
                    optimizer.load_state_dict(state)
        optimizer.finish()
        optimizer.close()
        return optimizer.gradients, torch.cat([p.detach().flatten() for p in model.parameters()])

    (given, first), *others = SimulatedWorld(3).run(body)
    assert given == 24
    assert all(torch.equal(first, other) for _, other in others)


def cut(tensor, nbytes):
    """What a damaged file may give: a tensor whose storage ends before it does."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def test_a_scheduler_s_setting_that_is_no_number_is_refused():
    state = lr_scheduler.StepLR(inner(), 2).state_dict()
    with pytest.raises(ValueError, match="the scheduler's state, step_size is 'two', expected what 2 is"):
        load_into(lr_scheduler.StepLR(inner(), 2), {**state, "step_size": "two"})


@pytest.mark.parametrize(
    "given",
    [
        None,
        [1.0],
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64),
        cut(torch.zeros(3), nbytes=8),
        cut(torch.zeros(6)[4:], nbytes=20),
    ],
)
def test_what_has_no_memory_for_every_real_element_is_not_dense(given):
    assert not is_dense(given)


@pytest.mark.parametrize("given", [torch.zeros(0), torch.zeros(3, 2).t(), torch.zeros(9)[4:], torch.tensor(1)])
def test_views_with_memory_are_dense(given):
    assert is_dense(given)


@pytest.mark.parametrize(
    ("like", "fits", "wrong", "said"),
    [
        ({"a": 1}, [{"a": 2, "b": 3}], [[1], {"b": 1}, {"a": "1"}], "(lacks|expected a)"),
        ([1], [[], (2, 3)], [1, ["1"], [-1]], "expected a"),
        ([], [[], ["anything"]], [{}], "expected a list"),
        (None, [None, 1, 0.5, [1]], ["1", b"1", {}], "expected None or a number"),
        (True, [False], [1, None, "True"], "expected a bool"),
        (1, [0, 2**40], [True, -1, 1.0, 2**70], "expected a"),
        (-1, [-5, 3], [-(2**70), 0.5], "expected a whole number"),
        (0.5, [1, 2.0, float("inf")], [float("nan"), True, "1", 2**70], "expected a"),
        (float("nan"), [float("nan")], ["nan"], "expected a number"),
        ("a", ["", "b"], [1, b"a"], "expected a text"),
        (
            torch.zeros(2),
            [torch.ones(2), torch.ones(2, dtype=torch.float64)],
            [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2).to_sparse(), [0.0, 0.0]],
            r"expected a (dense tensor|tensor of torch.float32 of shape \(2,\))",
        ),
    ],
)
def test_each_value_is_of_the_kind_of_one_s_own(like, fits, wrong, said):
    for given in fits:
        check_like(given, like, "here")
    for given in wrong:
        with pytest.raises(ValueError, match=rf"(?s)^(an entry of )?here.*{said}"):
            check_like(given, like, "here")


class Holder:
    """An object as ours are, with what may hang on one."""

    def __init__(self):
        self.steps, self.optimizer = 1, inner(lr=0.1)
        self.by_name, self.parts, self.pair = {"a": [1, 2]}, [{"b": 3}], ({"c": 4}, 5)
        self.module, self.mode = torch.nn.Linear(1, 1), Mode.SLOW
        self.own, self.lasting = Own(), Lasting()
        self.parts.append(self.parts)  # a circle


class Mode(Enum):
    SLOW = "slow"
    FAST = "fast"


class Own:
    def __init__(self):
        self.state = {"d": 6}

    def load_state_dict(self, state):
        """As a user's compressor has."""


class Lasting(Own):
    loads_wholly = True


def half_loaded(holder, error):
    holder.steps, holder.added, holder.mode = 2, True, Mode.FAST
    holder.by_name["a"].append(3)
    holder.by_name["e"] = 1
    holder.parts[0]["b"] = 0
    holder.parts.append(7)
    holder.pair[0].clear()
    holder.optimizer.param_groups[0]["lr"] = 0.2
    holder.optimizer.other = 1
    holder.own.state["d"] = 0
    holder.own.state = {}
    holder.lasting.state = {}
    holder.module.bias = None
    raise error


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("gone"), RuntimeError("size"), MemoryError(), OSError()])
def test_an_error_leaves_all_that_hangs_on_it_as_it_was(error):
    holder = Holder()
    kept = {name: vars(holder)[name] for name in ("by_name", "parts", "pair", "optimizer", "own")}
    raised = type(error) if isinstance(error, MemoryError | OSError) else ValueError
    with pytest.raises(raised), wholly(holder, "it", {"steps": 2}):
        half_loaded(holder, error)
    assert (holder.steps, holder.mode, hasattr(holder, "added")) == (1, Mode.SLOW, False)
    assert all(vars(holder)[name] is held for name, held in kept.items())
    assert (holder.by_name, holder.parts[0], holder.pair) == ({"a": [1, 2]}, {"b": 3}, ({"c": 4}, 5))
    assert len(holder.parts) == 2
    assert holder.optimizer.param_groups[0]["lr"] == 0.1
    assert not hasattr(holder.optimizer, "other")
    assert holder.own.state == {"d": 6}
    assert (holder.lasting.state, holder.module.bias) == ({}, None)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"state": [], "param_groups": [{"params": [0, 1]}]}, "the wrapped optimizer's state, state of the state is"),
        ({"state": {}, "param_groups": {}}, "the wrapped optimizer's state, param_groups of the state is"),
        (
            {"state": {}, "param_groups": [[]]},
            "an entry of the wrapped optimizer's state, param_groups of the state is",
        ),
        (
            {"state": {}, "param_groups": [{}]},
            r"an entry of the wrapped optimizer's state, param_groups lacks .'params'",
        ),
        ({"state": {0: 5}, "param_groups": [{"params": [0, 1]}]}, "not by parameter, of which it has .0, 1"),
        ({"state": {}, "param_groups": [{"params": [0, 0]}]}, "not by parameter, of which it has .0, 0"),
        ({"state": {}}, r"the wrapped optimizer's state lacks .'param_groups'"),
    ],
)
def test_a_state_that_is_built_otherwise_is_refused_by_name(state, said):
    with pytest.raises(ValueError, match=said):
        load_into(inner(), state)


@pytest.mark.parametrize("root", [0, 2])
def test_one_ranks_state_comes_to_all_or_to_none(root):
    """Bits, kinds and plain values are the root's; what it cannot give is an error on every rank, not a hang."""
    states = [{"a": torch.ones(2, 3, dtype=torch.bfloat16), "steps": 4, "none": None}, {}, {"mode": Mode.SLOW}]

    def body(comm, given):
        def take():
            assert comm.rank == root, "asked of another rank"
            return states[given]

        try:
            return str(broadcast_state(take, comm, root=root, device=torch.device("cpu")))
        except Exception as error:
            return type(error).__name__

    for given, expected in enumerate([*map(str, states[:2]), "CollectiveError", ["IndexError", "CollectiveError"]]):
        of_root, of_others = expected if isinstance(expected, list) else (expected, expected)
        told = SimulatedWorld(3).run(partial(body, given=given))
        assert told == [of_root if rank == root else of_others for rank in range(3)]
