"""Rules of one's own: their laws, and errors that name the rule where it is given, or at its first boundary."""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, comparable
from local_sgd import BMUF, EASGD, DeMo, DiLoCo, LocalSGD, PeriodicAveraging, Rule, SlowMo, StreamingDiLoCo
from local_sgd.testing import check_rule_laws
from torch import nn

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:two momenta")]


@dataclass
class Halfway(Rule):
    anchors = ("anchor",)

    def boundary(self, part, x, mean):
        return part["anchor"].lerp_(mean, 0.5)


@dataclass
class Damped(Rule):
    """Never moves its anchor."""

    anchors = ("first",)

    def boundary(self, part, x, mean):
        return x.lerp_(mean, 0.5)


@dataclass
class DampedMean(Damped):
    mean_is_model = True


@dataclass
class Forgetful(Halfway):
    """Keeps its momentum on self, which nobody saves."""

    def boundary(self, part, x, mean):
        self.v = getattr(self, "v", 0) * 0.5 + (mean - part["anchor"])
        return part["anchor"].add_(self.v)


@dataclass
class Own(Halfway):
    """Moves the anchor by what this rank alone has."""

    def boundary(self, part, x, mean):
        return part["anchor"].copy_(x)


@dataclass
class Chance(Halfway):
    def boundary(self, part, x, mean):
        return part["anchor"].copy_(mean).add_(torch.randn_like(mean))


@dataclass
class Launched(Halfway):
    """Keeps x, which each rank has of its own."""

    momenta = ("launched",)
    own = ("launched",)

    def boundary(self, part, x, mean):
        part["launched"].copy_(x)
        return super().boundary(part, x, mean)


@dataclass
class Shared(Launched):
    """Does not say so."""

    own = ()


@dataclass
class Scalar(Halfway):
    def state_dict(self):
        return {"n": np.float64(3)}


def of(rule):
    return lambda inner, **settings: PeriodicAveraging(inner, rule(), **settings)


def test_every_algorithm_keeps_the_laws(algorithm):
    if algorithm is not StreamingDiLoCo:  # whose fragments have steps of their own in the end
        check_rule_laws(algorithm)


@pytest.mark.parametrize("rule", [Halfway, DampedMean, Launched])
def test_rules_of_ones_own_keep_the_laws(rule):
    check_rule_laws(of(rule), ranks=2)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Damped, "the first anchor is the model"),
        (Forgetful, "after a state of step 4 was loaded.* nothing on self"),
        (Own, "ranks end with other bits"),
        (Chance, "ranks end with other bits"),
        (Shared, "ranks end with other bits.* name in `own`"),
        (Scalar, r"weights_only=True\) refuses the state"),
    ],
)
def test_rules_that_break_a_law_are_told_which(rule, says):
    with pytest.raises(AssertionError, match=says):
        check_rule_laws(of(rule))


@pytest.mark.parametrize("given", [Halfway, Halfway(), None])
def test_laws_of_a_rule_in_place_of_what_makes_it(given):
    with pytest.raises(TypeError, match=r"make is .*(Halfway|None).*, expected a function"):
        check_rule_laws(given)


class NoDataclass(Rule):
    anchors = ("anchor",)


@dataclass
class NoAnchor(Rule):
    anchor = ("z",)


@dataclass
class Word(Rule):
    anchors = "anchor"


@dataclass
class Twice(Rule):
    anchors = ("a",)
    momenta = ("a",)


@dataclass
class Misspelt(Halfway):
    own = ("ancor",)


class Made(Halfway):
    def __init__(self, share=0.5):
        self.share = share


class Bare(Halfway):
    share: float = 0.5


@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        (Halfway, TypeError, r"rule is <class .*Halfway.*, expected an instance of a Rule: give Halfway\(\)"),
        ("easgd", TypeError, "rule is 'easgd', expected an instance of a Rule"),
        (NoDataclass(), TypeError, "NoDataclass is no dataclass: .* @dataclass"),
        (NoAnchor(), TypeError, "NoAnchor has no anchors, .* first one is the model: .* mean_is_model = True"),
        (Word(), TypeError, r"Word has anchors = 'anchor', expected tuples of names"),
        (Twice(), TypeError, r"Twice has one name twice .*\('a',\)"),
        (Misspelt(), TypeError, r"Misspelt has own = \('ancor',\), expected some of its anchors"),
        (Made(), TypeError, "Made has an __init__ of its own.*: put @dataclass above it"),
        (Bare(), TypeError, "Bare declares share as no field.*: put @dataclass above it"),
    ],
)
def test_what_is_no_rule(rule, error, says):
    with pytest.raises(error, match=says):
        PeriodicAveraging(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), rule)


@dataclass
class Returns(Halfway):
    result: str = ""

    def boundary(self, part, x, mean):
        return {"none": None, "short": mean[:5], "part": part}[self.result] if self.result else part["velocity"]


@pytest.mark.parametrize(
    ("result", "error", "says"),
    [
        ("none", TypeError, "a boundary of Returns returned None, expected .* 8 elements"),
        ("short", TypeError, r"of Returns returned torch.Size\(\[5\]\), expected .* 8 elements"),
        ("part", TypeError, "a boundary of Returns returned Part.*, expected"),
        ("", KeyError, r"no state 'velocity', but \['anchor'\]"),
    ],
)
def test_what_a_boundary_returns(result, error, says):
    optimizer = PeriodicAveraging(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1), Returns(result), sync_every=1)
    with pytest.raises(error, match=says):
        optimizer.average()


def test_a_state_of_another_algorithm_is_told_by_name():
    def state(make):
        return make(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))

    makes = (LocalSGD, EASGD, DiLoCo, StreamingDiLoCo, BMUF, of(Halfway))
    optimizers = [state(make) for make in makes]
    for one in optimizers:
        for other in optimizers:
            if other is not one:
                with pytest.raises(ValueError, match=f"the state is of {one.what}, but this is {other.what}"):
                    other.load_state_dict(one.state_dict())


@dataclass
class Pull(Rule):
    """Goes a part of the way, by settings of any kind."""

    share: object = 0.5
    anchors = ("anchor",)

    def boundary(self, part, x, mean):
        share = self.share if isinstance(self.share, float) else 0.5
        return part["anchor"].lerp_(mean, share)


def pulled(comm, share):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return repr(PeriodicAveraging(inner, Pull(share), comm=comm, model=model))


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda values: [torch.tensor(values)]])
def test_ranks_compare_the_bits_of_settings_that_are_tensors(kind):
    """Not their text, which is rounded, and of a long one is cut."""
    one, other = kind([0.0] * 2000), kind([0.0] * 1000 + [1e-9] + [0.0] * 999)
    assert len(set(SimulatedWorld(2).run(lambda comm: pulled(comm, one)[:80]))) == 1
    with pytest.raises(CollectiveError, match=r"ranks disagree.*share="):
        SimulatedWorld(2).run(lambda comm: pulled(comm, other if comm.rank else one))


class Kind(Enum):
    COS = (torch.cos, 1)


class Spoken:
    def __str__(self):
        return "spoken"


def test_settings_of_any_kind_are_compared_alike_in_every_process():
    """By text without addresses, and by hashes; what has no memory to be hashed, and what is no value, by text."""
    values = {
        "mail at 0xdeadbeef": "mail at 0xdeadbeef",
        np.int64(2): 2,
        np.float64(0.25): 0.25,
        np.str_("mean"): "mean",
        np.float32: np.float32,
        nn.Parameter: nn.Parameter,
        torch.bfloat16: torch.bfloat16,
        torch.nn.functional.silu: "torch.nn.functional.silu",
        Kind.COS: "Kind.COS",
        (1, (2, 3)): (1, (2, 3)),
        Made: Made,
    }
    assert {key: comparable(key) for key in values} == values
    for value in (object(), Spoken(), partial(torch.relu), lambda: 0, [object()], {"a": (Spoken(),)}):
        assert " at 0x" not in repr(comparable(value))
    x = torch.arange(6.0).view(2, 3)
    alike = [x.t().contiguous().t(), x.clone().requires_grad_(), x.numpy(), x.expand(1, 2, 3)[0]]
    assert {comparable(one) for one in alike} == {comparable(x)}
    assert comparable({"w": x}) != comparable({"w": x + 1e-6})
    assert comparable(x.bfloat16()) != comparable(x)
    assert comparable(torch.tensor(0.5)) == 0.5
    for odd in (
        x.to_sparse(),
        x.to("meta"),
        np.array(["a"]),
        np.array([object()]),
        x.numpy()[:, ::-1],
        x.cfloat().conj(),
    ):
        assert " at 0x" not in repr(comparable(odd)) or isinstance(odd, np.ndarray)


@pytest.mark.parametrize("make", [DeMo, SlowMo])
def test_a_rule_counts_in_the_rate_of_the_last_step(quadratic, saved, make):
    """Wherever its scheduler is stepped, and even if it was saved amid a block."""

    def run(comm, *, early, stops=False):
        task = quadratic(comm.rank)
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = make(inner, comm=comm, model=task.model, sync_every=3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        for step in range(8):
            task.backward(step)
            optimizer.step()
            if early:
                schedule.step()
            optimizer.average()
            if not early:
                schedule.step()
        if stops:
            kept = saved((task.model.state_dict(), optimizer.state_dict()))
            task = quadratic(comm.rank)
            inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
            optimizer = make(inner, comm=comm, model=task.model, sync_every=3)
            task.model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        before = task.flat().clone()
        optimizer.finish()
        return before, task.flat().clone()

    late, early, resumed = (
        SimulatedWorld(2).run(lambda comm, how=how: run(comm, **how))
        for how in ({"early": False}, {"early": True}, {"early": True, "stops": True})
    )
    assert all(torch.equal(*finals) for finals in zip(early[0], late[0], strict=True))
    assert torch.equal(early[0][1], resumed[0][1])
    assert not torch.equal(*early[0]), "the last block is not lost"


def test_a_rank_whose_steps_are_skipped_goes_on_with_its_rate(quadratic):
    """As by a GradScaler of its own; and where the wrapped optimizer's own step is called, that counts."""

    def run(comm, own):
        task, rates = quadratic(comm.rank), []
        inner = torch.optim.SGD(task.model.parameters(), lr=0.1)
        optimizer = SlowMo(inner, comm=comm, model=task.model, sync_every=1)
        schedule = torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.1, 8)
        for step in range(6):
            task.backward(step)
            if comm.rank == 0 or step < 2:
                (inner if own else optimizer).step()
            optimizer.average()
            rates.append(optimizer._driver.parts[0].rate)
            schedule.step()
        optimizer.finish()
        return rates

    for own in (False, True):
        for rates in SimulatedWorld(2).run(lambda comm, own=own: run(comm, own)):
            assert rates == pytest.approx([0.1 * (1 - 0.9 * step / 8) for step in range(6)])


def test_rates_of_another_number_of_groups_are_refused(quadratic):
    def run(comm):
        task = quadratic(0)
        optimizer = SlowMo(torch.optim.SGD(task.model.parameters(), lr=0.1), comm=comm, sync_every=3)
        task.train(optimizer, [0])
        state = optimizer.state_dict()
        assert state["distributed"]["stepped"] == [0.1]
        state["distributed"]["stepped"] = [0.1, 0.2]
        with pytest.raises(ValueError, match="the state has 2 parameter groups, the optimizer 1"):
            optimizer.load_state_dict(state)

    SimulatedWorld(1).run(run)
