"""Changes to a model before it trains: dense gradients, --amp and --compile."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import AgreedError, RunError


def make_dense(model: nn.Module) -> None:
    """An nn.Embedding or nn.EmbeddingBag with `sparse=True` gives dense gradients from now on, in the same numbers.

    So every algorithm, clipping and weight decay take them. What is exchanged is a selection, or all of it, anyway:
    rows that were not looked up are zeros, which no selection takes before others.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


@contextmanager
def dense_gradients(model: nn.Module) -> Iterator[None]:
    """A backward that leaves dense gradients; AgreedError, on every rank for itself, where one is not.

    Also where an exchange that has begun meanwhile does not take it (--overlap).
    """
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise AgreedError(
                    f"the gradient of {name} is sparse ({parameter.grad.layout}), expected a dense one: give "
                    f"sparse=False where the model looks its rows up"
                ) from None


def autocast(options: Options, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts that autocast the forward of a step to bfloat16 on every device, whose range is float32's.

    So no loss is scaled and no step skipped, and residuals need no unscaling; parameters, gradients and their exchange
    stay in float32. Evaluations are of the model as it is exported, in float32. RunError on a GPU without bfloat16.
    """
    if not options.amp:
        return nullcontext
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RunError(f"--amp needs bfloat16, which {torch.cuda.get_device_name(device)} has not: leave it out")
    onednn = torch.backends.mkldnn.is_available() and device.type == "cpu"  # type: ignore[no-untyped-call]
    if onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _without_onednn
    return partial(torch.autocast, device.type, torch.bfloat16)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Autocast for a processor on which oneDNN has no bfloat16, so that torch's LSTM would raise; no slower there."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # not by torch.backends.mkldnn.flags, which warns of GPUs
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def compile_forward(model: nn.Module, options: Options, device: torch.device) -> None:
    """Its forward by torch.compile, where asked for; names in its state stay. RunError without a C++ compiler."""
    if not options.compile:
        return
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise RunError(f"--compile needs a C++ compiler, and there is no {compiler}: install one, or leave it out")
    model.forward = torch.compile(model.forward)  # not the module: its hooks are the loop's
