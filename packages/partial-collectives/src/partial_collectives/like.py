"""Sizes, dtypes and devices of what is summed: copies of what a rank gives, and totals in those shapes."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partial_collectives.collective import BITS
from partial_collectives.deposits import Given, weighted_copy
from partial_collectives.result import PartialResult

Tensors: TypeAlias = Tensor | Sequence[Tensor]
Weighted: TypeAlias = tuple[Tensors, float]
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""With `FLOATING`, dtypes that add."""


class Like:
    """Tensors, by fragment, of which sums have the shapes. TypeError or ValueError for what does not add.

    Each is kept as one element in its shape: the engine holds rounds until they are closed, not the user's memory.
    """

    def __init__(self, like: Tensors | Sequence[Sequence[Tensor]], compress: str | None) -> None:
        of, self._one = _listed(like), isinstance(like, Tensor)
        several = of and all(isinstance(each, list | tuple) for each in of)
        fragments: list[Sequence[Tensor]] = of if several else [of]
        for each in fragments:
            _check_like(each, compress)
        self.fragments = [[one.new_empty(()).expand(one.shape) for one in each] for each in fragments]

    def __repr__(self) -> str:
        return " | ".join(", ".join(f"{tuple(one.shape)} {one.dtype}" for one in each) for each in self.fragments)

    def flat(self) -> list[list[Tensor]]:
        """1-D tensors of the sizes and dtypes in host memory, by fragment; their elements mean nothing."""
        return [[torch.empty(one.numel(), dtype=one.dtype, device="cpu") for one in each] for each in self.fragments]

    def copies(self, given: Weighted, fragment: int) -> Given:
        """Copies of what is given for a fragment, once that has been checked."""
        if fragment not in range(len(self.fragments)):
            raise ValueError(
                f"something is given for fragment {fragment}, expected one of 0 … {len(self.fragments) - 1}"
            )
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise TypeError(f"{type(given).__name__} is given for fragment {fragment}, expected (tensors, weight)")
        like, tensors = self.fragments[fragment], _listed(given[0])
        weight = _checked_weight(given[1], like)
        if wrong := [_kind(one) for one in tensors if not _is_dense(one)]:
            raise TypeError(f"allreduce() is given {wrong}, expected a dense tensor, as in `like`; torch.from_numpy(x)")
        shapes, expected = ([(tuple(one.shape), one.dtype) for one in each] for each in (tensors, like))
        if shapes != expected:
            raise ValueError(f"allreduce() is given {shapes}, expected {expected}, as in `like`")
        return weighted_copy(tensors, weight)

    def shaped(self, result: PartialResult) -> Tensor | list[Tensor]:
        """Totals of a round, on the devices of `like` too."""
        of = zip(result.total, self.fragments[result.fragment], strict=True)
        shaped = [total.view(one.shape).to(one.device) for total, one in of]
        return shaped[0] if self._one else shaped


def check_alike(what: str, given: Sequence[Sequence[Tensor]], own: Sequence[Sequence[Tensor]]) -> None:
    """Raises ValueError for tensors of a state, by fragment, that are of other sizes or dtypes than the own ones."""
    got, expected = ([[(tuple(one.shape), one.dtype) for one in each] for each in of] for of in (given, own))
    if got != expected:
        raise ValueError(f"{what} of {got} are given, expected {expected}: as like= and compress= are here")


def _listed(tensors: Any) -> list[Any]:
    """Tensors, or what is given in their place, as a list."""
    return list(tensors) if isinstance(tensors, Iterable) and not hasattr(tensors, "shape") else [tensors]


def _is_dense(one: Any) -> bool:
    return isinstance(one, Tensor) and one.layout == torch.strided and not one.is_meta


def _kind(one: Any) -> str:
    return f"{one.dtype} on {one.device}, {one.layout}" if isinstance(one, Tensor) else type(one).__name__


def _check_like(like: Sequence[Tensor], compress: str | None) -> None:
    if not (compress is None or compress in tuple(BITS)):
        raise ValueError(f"compress is {compress!r}, expected None or one of {tuple(BITS)}")
    if not like or not all(isinstance(one, Tensor) for one in like):
        kinds = [_kind(one) for one in like]
        raise TypeError(f"like is no tensor, nor a list of them: {kinds}; expected what to sum, torch.from_numpy(x)")
    if wrong := [_kind(one) for one in like if not _is_dense(one) or one.dtype not in (*FLOATING, *INTEGER)]:
        raise TypeError(f"like holds {wrong}, expected dense tensors of a dtype that adds: {[*FLOATING, *INTEGER]}")
    if compress and (others := [str(one.dtype) for one in like if one.dtype != torch.float32]):
        raise TypeError(f"like holds {others}, expected float32 alone, which compress={compress!r} rounds")


def _checked_weight(weight: Any, like: Sequence[Tensor]) -> float:
    """Weight as a number, a whole one where `like` holds integers."""
    given = weight.item() if math.prod(getattr(weight, "shape", (0,))) == 1 else weight
    if not isinstance(given, Real):
        raise TypeError(f"weight is {weight!r}, expected a number, such as that of samples")
    try:
        number = float(given)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(f"weight is {weight!r}, expected 0 or more, such as a number of samples")
    if not any(one.dtype in INTEGER for one in like):
        return number
    if not number.is_integer():
        raise ValueError(f"weight is {weight!r}, expected a whole number, as `like` holds integers")
    return int(number)
