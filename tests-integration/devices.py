"""Devices for tests: CUDA's, and one without hardware that refuses what a GPU would refuse.

Tensors on "pretend" compute on the CPU. An operation on tensors of two devices is an error (but for numbers), and so is
NumPy on its memory; only `.cpu()`, `.to()`, `.copy_()`, `.item()` and `.tolist()` cross. What it cannot show: kernels,
streams, and time.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

CPU = torch.device("cpu")
CUDA = pytest.param(
    torch.device("cuda"),
    id="cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
# Never beside a GPU: autograd would take the pretended device for the process's accelerator, and look for its streams.
HAS_PRETEND = hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and not torch.cuda.is_available()
WHY_NOT = "a GPU is here" if torch.cuda.is_available() else f"torch {torch.__version__} takes no device made in Python"
needs_pretend = pytest.mark.skipif(not HAS_PRETEND, reason=WHY_NOT)
if HAS_PRETEND:
    backend_registration._setup_privateuseone_for_python_backend("pretend")
    # Autocast asks every accelerator, as a checkpoint does in its backward, also where no tensor lies on it.
    torch.get_device_module("pretend").get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
DEVICE = torch.device("pretend" if HAS_PRETEND else "privateuseone", 0)
OTHER_DEVICES = [pytest.param(DEVICE, id="pretend", marks=needs_pretend), CUDA]
every_device = pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), *OTHER_DEVICES])
every_other_device = pytest.mark.parametrize("device", OTHER_DEVICES)
ACROSS = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class Pretend(Tensor):
    """A tensor of the device: shape, strides and dtype of `held`, which nobody else should touch."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretend:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=DEVICE)
        tensor.held = held
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, *args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"Pretend({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a pretend tensor to numpy: use Tensor.cpu() first")


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on what its tensors hold; also what makes tensors of the device from none."""
    owners: dict[int, Pretend] = {}
    checked = op not in ACROSS

    def held_by(x: Any) -> Any:
        if isinstance(x, Pretend):
            owners[id(x.held)] = x
            return x.held
        if isinstance(x, (list, tuple)):
            return [held_by(item) for item in x]
        if checked and isinstance(x, Tensor) and x.dim():
            raise RuntimeError(f"{op}: expected all tensors on {DEVICE}, but one of {tuple(x.shape)} is on cpu")
        return CPU if isinstance(x, torch.device) else x

    def owned(x: Any) -> Any:
        if isinstance(x, Tensor):
            return owners[id(x)] if id(x) in owners else Pretend(x)
        return type(x)(map(owned, x)) if isinstance(x, (list, tuple)) else x

    result = op(*map(held_by, args), **{name: held_by(value) for name, value in kwargs.items()})
    assert all(owner.shape == owner.held.shape for owner in owners.values()), f"{op} resized what it was given"
    return result if kwargs.get("device", DEVICE).type == "cpu" else owned(result)


LIBRARIES = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
LIBRARIES[0].fallback(compute, dispatch_key="PrivateUse1")
for overload in (
    torch.ops.aten.copy_.default,  # torch's own asks for a kernel of this device
    torch.ops.aten.arange.default,  # torch's own resizes its result
    torch.ops.aten.arange.start,
    torch.ops.aten.arange.start_step,
):
    LIBRARIES[1].impl(overload, functools.partial(compute, overload), "PrivateUse1")
