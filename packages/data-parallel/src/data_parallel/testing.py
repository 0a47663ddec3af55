"""The laws of a dense compressor, for tests of one's own.

    def test_laws():
        check_dense_laws(lambda: Rounded(per_unit=2), atol=0)

trains with it in simulated worlds.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld
from sparse_compress.testing import reloaded
from torch import nn

from data_parallel.optimizer import DistributedOptimizer
from data_parallel.schemes.dense import DenseCompressor


def check_dense_laws(
    make: Callable[[], DenseCompressor],
    *,
    sizes: Sequence[int] = (1, 2, 4, 8),
    dtype: torch.dtype = torch.float32,
    atol: float = 1e-3,
    **settings: Any,
) -> None:
    """Asserts the laws of training by a dense compressor, in simulated worlds.

    Agreement: parameters have the same bits on every rank. Conservation: Σ gradients = P · Σ means + Σ residuals. A
    rank's inf or NaN shows in the total, and a step that is skipped for it leaves no trace. A run resumed from a file
    has the same bits.

    Args:
        make: Makes the compressor, anew for each rank and run.
        sizes: Numbers of ranks; means of powers of two are exact.
        dtype: Of the parameters.
        atol: Tolerance of conservation, for gradients of 7 bits, up to 25 and down to steps of 2⁻¹⁶; 0 for a compressor
            whose sums are exact.
        settings: Of the `DistributedOptimizer`, such as overlap.

    Raises:
        AssertionError: A law does not hold; says which, where.
        CollectiveError: The compressor returns another type, shape or dtype, or writes to its input.
        TypeError: `make` is a compressor, or no function.
        ValueError: There is nothing to check.
    """
    if isinstance(make, DenseCompressor) or not callable(make):
        raise TypeError(f"make is {make!r}, expected a function that makes a new one: lambda: Mine()")
    if not isinstance(sizes, Collection) or not sizes:
        raise ValueError(f"sizes={sizes!r} checks nothing: expected numbers of ranks, as (1, 2, 4)")
    compressor = make()
    state, again = compressor.initial_state(52), compressor.initial_state(52)
    assert state is None or state is not again, f"initial_state() returns the same {state!r} twice, expected a new dict"
    for size in sizes:

        def run(*steps: int, saved: Sequence[Any] = (), size: int = size) -> list[Any]:
            def train(comm: Communicator) -> Any:
                return _train(comm, steps, saved and saved[comm.rank], dtype, algorithm=make(), **settings)

            return SimulatedWorld(size).run(train)

        whole, resumed, skipping = run(0, 1, 2), run(1, 2, saved=run(0)), run(0, *BAD, 1, 2)
        given, kept = (sum(result[i] for result in whole) for i in (0, 2))
        for rank, (one, again, other) in enumerate(zip(whole, resumed, skipping, strict=True)):
            lost, where = (given - one[1] - kept).abs(), f"on rank {rank} of {size}"
            assert torch.equal(one[1], whole[0][1]), f"agreement: other parameters {where} than on rank 0"
            assert lost.max() <= atol, f"conservation: element {lost.argmax()} is off by {lost.max()} {where}"
            assert all(map(torch.equal, one[1:3], again[1:3])), f"a resumed run has other bits {where}"
            assert other[3]["optimizer"]["distributed"]["skipped"] == len(BAD), (
                f"an inf or a NaN of rank {size - 1} does not show {where}"
            )
            assert all(map(torch.equal, one[1:3], other[1:3])), f"a skipped step leaves a trace {where}"


BAD = {8: torch.inf, 9: torch.nan}
"""Steps in which an element of the last rank's gradient is not finite, and what it is."""


def _train(comm: Communicator, steps: Sequence[int], saved: Any, dtype: torch.dtype, **settings: Any) -> Any:
    """Σ of this rank's gradients, P · what the parameters have moved, the residuals; states to go on from."""
    shapes = {"matrix": (9, 5), "vector": (7,)}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()})
    inner, settings = torch.optim.SGD(model.parameters(), lr=1.0), {"nonfinite": "skip", "verify": 0, **settings}
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm=comm, **settings)
    if saved:
        model.load_state_dict(saved[3]["model"])
        optimizer.load_state_dict(saved[3]["optimizer"])
    given, units = torch.zeros(52), 4.0 ** (1 + torch.arange(52) % 8)  # coarse and fine quantisers must round some
    for step in steps:
        whole = torch.randint(-99, 100, (52,), generator=torch.Generator().manual_seed(10 * step + comm.rank))
        gradient = whole / units
        given += gradient * (step not in BAD)
        gradient[50] += BAD.get(step, 0) if comm.rank == comm.size - 1 else 0
        optimizer.zero_grad()
        torch.autograd.backward(nn.utils.parameters_to_vector(model.values()), gradient.to(dtype))
        optimizer.step()
    for name, state in optimizer.state_dict()["distributed"]["algorithm_state"]:
        reloaded(state, f"{settings['algorithm']}, bucket {name}")
    states = reloaded({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}, settings["algorithm"])
    residuals = states["optimizer"]["distributed"]["residuals"]
    moved, kept = (nn.utils.parameters_to_vector(of[name] for name in shapes) for of in (model, residuals))
    return given, -comm.size * moved.detach(), kept, states
