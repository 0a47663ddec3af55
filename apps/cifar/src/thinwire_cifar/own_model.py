"""A model by its object reference, "package.module:function": the catalogue's, or one of the user's own."""

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from thinwire_trainer.errors import RunError
from torch import Tensor, nn

from thinwire_cifar.data.images import Images

EXPECTED = "expected build(*, channels, classes, size) -> torch.nn.Module, with size in pixels a side"


def built(name: str, reference: str, images: Images) -> nn.Module:
    """The model for these images. RunError if it is not there, not callable, or not a classifier of them to train.

    name: as it was asked for. A fault of its author is told in one line, with the line; one of the catalogue's is ours
    and keeps its traceback.
    """
    build = _resolved(name, reference)
    given = {"channels": images.channels, "classes": images.classes, "size": images.size}
    try:
        inspect.signature(build).bind(**given)
    except (TypeError, ValueError) as error:
        raise RunError(f"--dnn {name} cannot be called with {', '.join(given)} ({error}): {EXPECTED}") from None
    try:
        if name != reference:
            return _a_module(name, build(**given))
        with _told(f"--dnn {name} failed where it builds the model", but=(ValueError,)):
            model = _a_module(name, build(**given))
    except ValueError as error:  # such as patches that do not fill the image
        raise RunError(f"--dnn {name} does not fit these images ({error})") from None
    _require_logits(name, model, images)
    _require_trainable(name, model, images)
    return model


def _a_module(name: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise RunError(f"--dnn {name} gave a {type(model).__name__}: {EXPECTED}")
    return model


def _resolved(name: str, reference: str) -> Callable[..., Any]:
    cannot = f"--dnn {name} cannot be imported"
    try:
        with _told(cannot, but=(ImportError, AttributeError, ValueError)):
            build: object = pkgutil.resolve_name(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise RunError(f"{cannot} ({error}): is it on PYTHONPATH, or in this folder?") from None
    if not callable(build):
        raise RunError(f"--dnn {name} is a {type(build).__name__}, not callable: {EXPECTED}")
    return build


@contextmanager
def _told(what: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Whatever the user's code raises, as a RunError that begins with `what`; `but` others are left to the caller."""
    try:
        yield
    except SystemExit as error:
        raise RunError(f"{what}: it called sys.exit{_raised_in(error)}") from None
    except Exception as error:
        if isinstance(error, (RunError, *but)):
            raise
        raise RunError(f"{what} ({type(error).__name__}: {error}){_raised_in(error)}") from None


def _raised_in(error: BaseException) -> str:
    """Find where the user's code raised it, as far as it can be told from ours, torch's and what imports."""
    others = (__file__, pkgutil.__file__, importlib.__file__, str(Path(torch.__file__).parent), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f", in {Path(frame.filename).name}, line {frame.lineno}"
    return ""


def _require_logits(name: str, model: nn.Module, images: Images) -> None:
    """Check the logits of two black images; leaves the model, and the generators of random numbers, as they were."""
    training = model.training
    with torch.no_grad():
        _logits(name, model.eval(), images)
    model.train(training)


def _require_trainable(name: str, model: nn.Module, images: Images) -> None:
    """Check the same in the mode that it trains in; what the images change in its buffers is taken back."""
    parameters = dict(model.named_parameters())
    if unreal := [parameter for parameter, values in parameters.items() if values.is_complex()]:
        raise RunError(f"--dnn {name} has complex parameters ({unreal[0]}), expected real ones: keep both parts apart")
    if not any(values.requires_grad for values in parameters.values()):
        raise RunError(f"--dnn {name} has no parameter that requires a gradient: there is nothing to train")
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.enable_grad():
        logits = _logits(name, model, images)
    with torch.no_grad():
        for buffer, values in zip(model.buffers(), before, strict=True):
            buffer.copy_(values)
    if not logits.requires_grad:
        raise RunError(f"--dnn {name} makes logits that no parameter has a gradient of: does its forward detach them?")


def _logits(name: str, model: nn.Module, images: Images) -> Tensor:
    shape = (2, images.channels, images.size, images.size)
    with _told(f"--dnn {name} does not take images {shape}"), torch.random.fork_rng(devices=[]):
        logits: object = model(torch.zeros(shape))
    found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or found != (2, images.classes):
        raise RunError(
            f"--dnn {name} makes {found} of images {shape}, expected logits of shape {(2, images.classes)}, "
            f"a number for each class"
        )
    if not logits.is_floating_point():
        raise RunError(f"--dnn {name} makes {logits.dtype} of images, expected logits, which are floating-point")
    return logits
