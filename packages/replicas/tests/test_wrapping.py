"""One optimizer takes one wrapper: a second one would exchange the same gradients or parameters again."""

import gc
import warnings

import pytest
import torch
from communicators import SimulatedWorld, as_communicator
from replicas import Buffers, Wrapping
from torch import nn

pytestmark = pytest.mark.quick


class Alone(Wrapping):
    """Exchanges nothing, but steps where a wrapper would."""

    def __init__(self, optimizer, comm=None, *, fails=False, model=None):
        super().__init__(optimizer, None, comm, model=model)
        if fails:
            raise ValueError("a setting is wrong")

    def step(self, closure=None):
        self.check_step()
        self.check_exchange()
        self.optimizer.step()


class Other(Alone):
    """Another wrapper."""


def sgd():
    model = nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Alone, Other])
def test_a_wrapper_is_not_wrapped(kind):
    with pytest.raises(
        TypeError, match=rf"optimizer is an Alone, .* give {kind.__name__} what that wraps, .*\.optimizer"
    ):
        kind(Alone(sgd()))


@pytest.mark.parametrize("kind", [Alone, Other])
def test_two_wrappers_side_by_side_are_refused_as_soon_as_both_are_used(kind):
    def body(comm):
        inner = sgd()
        first, second = Alone(inner, comm), kind(inner, comm)
        first.step()
        second.step()
        for call in (first.step, first.check_exchange, first.check_step):
            with pytest.raises(
                RuntimeError, match=f"an Alone of an optimizer that an? {kind.__name__}, made later, steps now"
            ):
                call()
        second.step()

    SimulatedWorld(2).run(body)


def test_a_wrapper_is_overtaken_by_a_later_one_of_its_parameters_or_of_a_part_of_them_while_that_lives():
    class Started(Alone):
        def __init__(self, *parameters, refused=False):
            super().__init__(torch.optim.SGD(parameters, lr=0.1))
            if refused:
                self.named = {"weight": refused}
            self.start_alike("")

    a, b, c = (nn.Parameter(torch.ones(3)) for _ in range(3))
    first, apart = Started(a, b), Started(c)
    partly = Started(b, c)
    assert [first.overtaken, apart.overtaken, partly.overtaken] == [False, True, False]
    with pytest.raises(AttributeError) as kept:
        Started(a, refused=True)
    assert not first.overtaken, kept  # what is refused overtakes nothing
    part, whole = Started(a), Started(a, b, c)
    assert [first.overtaken, partly.overtaken, part.overtaken, whole.overtaken] == [True, True, True, False]
    del part, whole
    gc.collect()
    assert [first.overtaken, partly.overtaken] == [False, False]


@pytest.mark.parametrize("shown", [True, False])
def test_a_module_that_is_called_module_is_no_ddp_where_it_is_shown(shown, monkeypatch):
    monkeypatch.setattr("replicas.process_group.default_group", lambda: object())
    monkeypatch.setattr("replicas.process_group.dist.get_world_size", lambda: 2)

    def body(comm):
        model = nn.ModuleDict({"module": nn.Linear(2, 2)})
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            Wrapping(inner, None if shown else model.named_parameters(), comm, model=model if shown else None)
        return [str(one.message) for one in told]

    [told, _] = SimulatedWorld(2).run(body)
    assert len(told) == 1 - shown
    assert all("as those of a DDP module do; if they are of one: Distributed" in text for text in told)


def test_a_wrapper_may_be_made_anew():
    """As errors advise, while the old one lives; where it is kept by a scheduler, too."""
    optimizer = Alone(sgd())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    optimizer = Other(optimizer.optimizer)
    optimizer.step()
    scheduler.step()
    optimizer.step()


def test_a_wrapper_that_could_not_be_made_takes_nothing_over():
    optimizer = Alone(sgd())
    with pytest.raises(ValueError, match="a setting is wrong") as kept:
        Other(optimizer.optimizer, fails=True)
    optimizer.step()
    Other(optimizer.optimizer).step()  # thrown away
    optimizer.step()
    assert kept.value


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(1).expand(5), torch.eye(3).to_sparse(), torch.zeros(2, device="meta")],
    ids=["expanded", "sparse", "meta"],
)
def test_buffers_that_cannot_be_copied_into_are_named(buffer):
    model = nn.Linear(3, 2)
    model.register_buffer("table", buffer)
    says = r"sparse, expanded or on the meta device, .*\['table'\]; register them dense"
    with pytest.raises(ValueError, match=says):
        Buffers(model, "average", as_communicator(None), "Alone")
    optimizer = Alone(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    with pytest.raises(ValueError, match=says):
        optimizer.start_alike("", model=model)
