"""Laws of the family, for the test of a rule."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from communicators import Communicator, SimulatedWorld
from torch import Tensor, nn

from local_sgd.periodic import PeriodicAveraging

STEPS, SYNC_EVERY = 12, 3


def check_rule_laws(make: Callable[..., PeriodicAveraging], *, ranks: int = 3) -> None:
    """Checks in simulated worlds what every rule must keep to.

        check_rule_laws(lambda inner, **settings: PeriodicAveraging(inner, HeavyBall(beta=0.3), **settings))

    Ranks agree: all end with the same bits of model and state. `finish` leaves the model that `averaged_model` showed,
    within rounding, and that has moved. A state from the middle of a block or from its end, loaded into a new rule,
    goes on with the same bits.

    Args:
        make: Wraps the given optimizer, with a new rule each time, and passes the keyword arguments on.
        ranks: Number of ranks.

    Raises:
        AssertionError: Names the law that does not hold.
    """
    ends = SimulatedWorld(ranks).run(partial(_train, make=make, at=0))
    for begin, shown, *end in ends:
        assert not torch.equal(begin, end[0]), "finish() puts the first parameters back: the first anchor is the model"
        assert torch.allclose(shown, end[0], 1e-4, 1e-5), "finish() leaves another model than averaged_model() showed"
        assert all(map(torch.equal, end, ends[0][2:])), "ranks end with other bits: use what they share, and no chance"
    for at in (0, SYNC_EVERY + 1, 2 * SYNC_EVERY):
        others = SimulatedWorld(ranks, seed=1, jitter=1e-3).run(partial(_train, make=make, at=at))
        assert all(map(torch.equal, chain(*ends), chain(*others))), (
            f"other bits {f'after a state of step {at} was loaded' if at else 'where messages come later'}: "
            "all that a rule keeps is in anchors and momenta, nothing on self"
        )


def _train(comm: Communicator, make: Callable[..., PeriodicAveraging], at: int) -> list[Tensor]:
    """Parameter at the beginning, shown and at the end, then state; after `at` steps all goes on in new ones."""
    model, optimizer = _made(comm, make)
    begin = model.weight.detach().clone()
    for step in range(STEPS):
        if 0 < at == step:
            weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
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
    kept = optimizer.state_dict()["distributed"]["kept"].values()
    return [begin, shown, model.weight.detach(), *(named["weight"] for named in kept)]


def _made(comm: Communicator, make: Callable[..., PeriodicAveraging]) -> tuple[nn.Linear, PeriodicAveraging]:
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, make(inner, comm=comm, model=model, sync_every=SYNC_EVERY)
