"""Laws of the family, for the test of a rule."""

from collections.abc import Callable
from functools import partial
from io import BytesIO
from itertools import chain
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld
from torch import Tensor, nn

from local_sgd.periodic import PeriodicAveraging
from local_sgd.rule import Rule

STEPS, SYNC_EVERY = 12, 3


def check_rule_laws(make: Callable[..., PeriodicAveraging], *, ranks: int = 3) -> None:
    """Checks in simulated worlds what every rule must keep to.

        check_rule_laws(lambda inner, **settings: PeriodicAveraging(inner, HeavyBall(beta=0.3), **settings))

    Ranks agree: all end with the same bits of model and state, except `own`. `finish` leaves the model that
    `averaged_model` showed, within rounding, and that has moved. A state from the middle of a block or from its end,
    saved to a file and loaded into a new rule, goes on with the same bits.

    Args:
        make: Wraps the given optimizer, with a new rule each time, and passes the keyword arguments on.
        ranks: Number of ranks.

    Raises:
        AssertionError: Names the law that does not hold.
        TypeError: `make` is a rule, the class of one, or no function.
    """
    if issubclass(make if isinstance(make, type) else type(make), Rule) or not callable(make):
        raise TypeError(
            f"make is {make!r}, expected a function that makes an optimizer with a new one: "
            "lambda inner, **settings: PeriodicAveraging(inner, Mine(), **settings)"
        )
    ends = SimulatedWorld(ranks).run(partial(_train, make=make, at=0))
    for (begin, shown, *end), _ in ends:
        assert not torch.equal(begin, end[0]), "finish() puts the first parameters back: the first anchor is the model"
        assert torch.allclose(shown, end[0], 1e-4, 1e-5), "finish() leaves another model than averaged_model() showed"
        assert all(map(torch.equal, end, ends[0][0][2:])), (
            "ranks end with other bits: use what they share, and no chance; name in `own` what each keeps for itself"
        )
    for at in (0, SYNC_EVERY + 1, 2 * SYNC_EVERY):
        others = SimulatedWorld(ranks, seed=1, jitter=1e-3).run(partial(_train, make=make, at=at))
        assert all(map(torch.equal, chain(*chain(*ends)), chain(*chain(*others)))), (
            f"other bits {f'after a state of step {at} was loaded' if at else 'where messages come later'}: "
            "all that a rule keeps is in anchors and momenta, nothing on self"
        )


def _train(comm: Communicator, make: Callable[..., PeriodicAveraging], at: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameter at the beginning, shown and at the end, shared state; own state. After `at` steps new ones go on."""
    model, optimizer = _made(comm, make)
    begin = model.weight.detach().clone()
    for step in range(STEPS):
        if 0 < at == step:
            weights, state = _reloaded(model, optimizer)
            model, optimizer = _made(comm, make)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        generator = torch.Generator().manual_seed(1000 * step + comm.rank)
        model.weight.grad = model.weight.detach() - comm.rank + torch.randn(2, 3, generator=generator)
        optimizer.step()
        optimizer.average()
    with optimizer.averaged_model():
        shown = model.weight.detach().clone()
    optimizer.finish()
    kept, owned = optimizer.state_dict()["distributed"]["kept"], optimizer.rule.own
    own, shared = ([of["weight"] for name, of in kept.items() if (name in owned) is its] for its in (True, False))
    return [begin, shown, model.weight.detach(), *shared], own


def _reloaded(model: nn.Module, optimizer: PeriodicAveraging) -> Any:
    """States of both, as a checkpoint gives them back."""
    file = BytesIO()
    try:
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise AssertionError(
            f"torch.load(weights_only=True) refuses the state {optimizer.rule.state_dict()}: a rule keeps numbers, "
            "text, lists, dicts and tensors, such as float(x) of a NumPy scalar"
        ) from error


def _made(comm: Communicator, make: Callable[..., PeriodicAveraging]) -> tuple[nn.Linear, PeriodicAveraging]:
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, make(inner, comm=comm, model=model, sync_every=SYNC_EVERY)
