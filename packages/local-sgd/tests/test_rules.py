"""Rules of one's own: their laws, and errors that name the rule where it is given, or at its first boundary."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from local_sgd import BMUF, EASGD, DiLoCo, LocalSGD, PeriodicAveraging, Rule, StreamingDiLoCo
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
        (Scalar, r"weights_only=True\) refuses the state .*float64"),
    ],
)
def test_rules_that_break_a_law_are_told_which(rule, says):
    with pytest.raises(AssertionError, match=says):
        check_rule_laws(of(rule))


@pytest.mark.parametrize("given", [Halfway, Halfway()])
def test_laws_of_a_rule_in_place_of_what_makes_it(given):
    with pytest.raises(TypeError, match=r"make is .*Halfway.*, expected a function"):
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
