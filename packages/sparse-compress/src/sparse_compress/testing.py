"""The laws of a compressor, for tests of one's own.

    def test_laws():
        check_compressor_laws(lambda numel: Mine())

asserts them on random, tied, zero and non-finite tensors of odd sizes.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from sparse_compress.arguments import check_compressor
from sparse_compress.compressors.compressor import Compressor, StatefulCompressor
from sparse_compress.error_feedback import ErrorFeedback
from sparse_compress.vector import SparseVector

SIZES = (1, 2, 33, 400, 0)


def check_compressor_laws(make: Callable[[int], Compressor]) -> None:
    """Asserts what a compressor sends, and that with error feedback nothing is lost, also where steps are undone.

    A state is a dict that a checkpoint can hold.

    Args:
        make: Makes a new compressor for tensors of so many elements, each time with the same settings.

    Raises:
        AssertionError: A law does not hold; says which, where.
        TypeError: `make` is a compressor, or no function, or makes no compressor.
    """
    if not callable(make) or (hasattr(make, "entries") and not isinstance(make, type)):
        raise TypeError(f"make is {make}, expected a function that makes a new one: lambda numel: Mine()")
    check_compressor(make(1))
    for numel in SIZES:
        for seed in range(5):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
            for tensor in (x, x.round(), 0 * x):
                _check_sent(make(numel), tensor)
            _check_nonfinite(make(numel), torch.where(x == x.max(), torch.nan, x) if numel else x)
        if not getattr(make(numel), "unbiased", False):
            _check_conservation(make, numel)


def _check_sent(compressor: Compressor, x: Tensor) -> None:
    """Checks that at most `entries` elements came, in order, with values that leave less than sending none would."""
    before, most, whose = x.clone(), compressor.entries(x.numel()), f"{compressor} of {x.numel()} elements"
    sparse = compressor(x)
    assert torch.equal(x, before), f"{whose}: the tensor was changed"
    fits = isinstance(sparse, SparseVector) and (sparse.numel, sparse.dtype) == (x.numel(), x.dtype)
    assert fits, f"{whose}: returns {sparse}, expected a SparseVector of its numel and {x.dtype}"
    assert most <= x.numel(), f"{whose}: entries() says {most}, expected no more than there are"
    assert len(sparse) <= most, f"{whose}: sends {len(sparse)}, but entries() says at most {most}"
    assert len(sparse) or not x.any(), f"{whose}: sends nothing, though not all are zero"
    assert torch.equal(sparse.indices, torch.unique(sparse.indices)), f"{whose}: {sparse.indices} do not increase"
    left, all_of_it = (x.double() - sparse.to_dense().double()).norm(), x.double().norm()
    right = torch.equal(sparse.values, x[sparse.indices.long()]) or left < all_of_it
    assert right or getattr(compressor, "unbiased", False), (
        f"{whose}: values are not those of the tensor, and leave ‖x − s‖ = {left:.4g} of ‖x‖ = {all_of_it:.4g}"
    )


def _check_nonfinite(compressor: Compressor, x: Tensor) -> None:
    """Checks that a compressor that says it finds NaN and inf sends one of them."""
    found = not compressor(x).values.isfinite().all() or bool(x.isfinite().all())
    assert found or not getattr(compressor, "finds_nonfinite", False), f"{compressor}: sends no NaN of {x}"


def _check_conservation(make: Callable[[int], Compressor], numel: int) -> None:
    """Sent and residual are what has accumulated; a step that is rolled back leaves no trace."""
    feedback = ErrorFeedback(make(numel), tentative=True)
    total = sent = torch.zeros(numel)
    for seed in range(5):
        gradient = torch.randint(-9, 10, (numel,), generator=torch.Generator().manual_seed(seed)).float()
        undone = feedback.compress("w", gradient).to_dense()
        feedback.rollback()
        again = feedback.compress("w", gradient).to_dense()
        assert torch.equal(undone, again), (
            f"{feedback.compressor}: a step that was rolled back left a trace, {again} for {undone}: it draws by "
            "chance, or keeps what its state_dict() does not hold in memory of its own"
        )
        feedback.commit()
        total, sent = total + gradient, sent + again
        held = sent + feedback.residual("w")
        assert torch.allclose(held, total, rtol=0, atol=1e-3), (
            f"{feedback.compressor}: sent and residual are {held}, accumulated {total}"
        )
    if isinstance(feedback.compressor, StatefulCompressor):
        reloaded(feedback.compressor.state_dict(), feedback.compressor)
    resumed = ErrorFeedback(make(numel), tentative=True)
    resumed.load_state_dict(reloaded(feedback.state_dict(), resumed.compressor))
    for seed in range(5, 10):
        gradient = torch.randint(-9, 10, (numel,), generator=torch.Generator().manual_seed(seed)).float()
        here, there = (one.compress("w", gradient).to_dense() for one in (feedback, resumed))
        assert torch.equal(here, there), (
            f"{feedback.compressor}: a loaded state does not go on as the saved one, it sends {there} for {here}: "
            "state_dict() lacks something that it keeps between calls"
        )
        feedback.commit()
        resumed.commit()


def reloaded(state: Any, whose: object) -> Any:
    """The state as a checkpoint gives it back; AssertionError for no dict, and for what torch.load refuses.

    Args:
        state: A dict of plain values and tensors.
        whose: Whose it is, for messages.
    """
    assert isinstance(state, dict), f"{whose}: the state is {state!r}, expected a dict"
    file = BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise AssertionError(
            f"{whose}: torch.load(weights_only=True) refuses the state {state}: keep numbers, text, lists, dicts and "
            "tensors, such as float(x) of a NumPy scalar"
        ) from error
