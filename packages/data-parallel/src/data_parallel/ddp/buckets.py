"""DDP's buckets as ours: which parameters lie where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from communicators import Bucket
from torch import Tensor

from data_parallel.state_dict import numbered


class Buckets:
    """Buckets of DDP. names: of all parameters by position; unnamed ones are numbered as DDP first brings them."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.names = [name for name, _ in named]
        self._all_are_named = bool(named)
        self._positions = {id(p): position for position, (_, p) in enumerate(named)}
        self._parameters = [p for _, p in named]  # kept, so that no id is used twice
        self._known: dict[tuple[int, ...], tuple[Bucket, list[slice]]] = {}

    def know(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Adds parameters that DDP has brought to the state that this one is copied from."""
        for name, p in named:
            if id(p) not in self._positions:
                self._positions[id(p)] = len(self.names)
                self.names.append(name)
                self._parameters.append(p)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Known parameters by name."""
        return dict(zip(self.names, self._parameters, strict=True))

    def of(self, parameters: Sequence[Tensor], flat: Tensor) -> tuple[Bucket, list[slice]]:
        """The bucket of these parameters, which DDP has laid into `flat`, and where each lies in it.

        TypeError for a complex one.
        """
        key = tuple(map(id, parameters))
        known = self._known.get(key)
        layout = flat.numel(), flat.dtype, flat.device
        if known is None or (known[1][-1].stop, known[0].dtype, known[0].device) != layout:
            bucket = self._made(parameters, flat)
            known = self._known[key] = bucket, spans_of(bucket)
        return known

    def _made(self, parameters: Sequence[Tensor], flat: Tensor) -> Bucket:
        members = tuple(self._position(p) for p in parameters)
        _refuse_complex([self.names[m] for m, p in zip(members, parameters, strict=True) if p.is_complex()])
        shapes, strides = tuple(p.shape for p in parameters), tuple(map(_strides_in_bucket, parameters))
        return Bucket(members, shapes, flat.dtype, flat.device, strides)

    def _position(self, parameter: Tensor) -> int:
        if id(parameter) not in self._positions:
            if self._all_are_named:
                raise ValueError(
                    f"DDP brings a parameter of shape {tuple(parameter.shape)} that is not among named_parameters: "
                    "give those of the module that DDP wraps, all of them"
                )
            self._positions[id(parameter)] = len(self.names)
            self.names.append(numbered(len(self.names)))
            self._parameters.append(parameter)
        return self._positions[id(parameter)]


def spans_of(bucket: Bucket) -> list[slice]:
    """Span of each member in the flat tensor."""
    return [slice(*edge) for edge in pairwise(accumulate((shape.numel() for shape in bucket.shapes), initial=0))]


def unused_spans(spans: Sequence[slice], flat: Tensor) -> list[slice]:
    """Spans of members that are all zeros. For most others the first elements show that they are not."""
    if not flat.is_cpu:  # one look for all of them, because each waits for the device
        used = torch.stack([flat[span].any() for span in spans]).tolist()
        return [span for span, any_used in zip(spans, used, strict=True) if not any_used]
    return [span for span in spans if not flat[span][:64].any() and not flat[span].any()]


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """Strides of a gradient in DDP's bucket: those of the parameter if it has no gaps in memory, else row by row."""
    dense = torch.empty_like(parameter, device="meta")  # keeps the strides exactly where there are no gaps
    return dense.stride() if dense.stride() == parameter.stride() else dense.contiguous().stride()


def _refuse_complex(names: list[str]) -> None:
    if names:
        raise TypeError(
            f"complex parameter {names[0]!r}: give DDP its real view, nn.Parameter(torch.view_as_real(p)), and take "
            "torch.view_as_complex of that in forward"
        )
