"""A model by its place, "package.module:function": the catalogue's, or one of the user's own."""

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from trainer.errors import RunError

from cifar.data.images import Images

EXPECTED = "expected build(*, channels, classes, size) -> torch.nn.Module, with size in pixels a side"


def built(name: str, place: str, images: Images) -> nn.Module:
    """The model for these images. RunError if it is not there, not callable, or not a classifier of them.

    name: as it was asked for. What fails inside the function is its author's to mend, and keeps its traceback.
    """
    build = _resolved(name, place)
    given = {"channels": images.channels, "classes": images.classes, "size": images.size}
    try:
        inspect.signature(build).bind(**given)
    except (TypeError, ValueError) as error:
        raise RunError(f"--dnn {name} cannot be called with {', '.join(given)} ({error}): {EXPECTED}") from None
    try:
        model = build(**given)
    except ValueError as error:  # such as patches that do not fill the image
        raise RunError(f"--dnn {name} does not fit these images ({error})") from None
    if not isinstance(model, nn.Module):
        raise RunError(f"--dnn {name} gave a {type(model).__name__}: {EXPECTED}")
    if name == place:
        _require_logits(name, model, images)
    return model


def _resolved(name: str, place: str) -> Callable[..., Any]:
    try:
        build: object = pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise RunError(f"--dnn {name} cannot be imported ({error}): is it on PYTHONPATH, or in this folder?") from None
    if not callable(build):
        raise RunError(f"--dnn {name} is a {type(build).__name__}, not callable: {EXPECTED}")
    return build


def _require_logits(name: str, model: nn.Module, images: Images) -> None:
    """Of two black images; leaves the model, and the generators of random numbers, as they were."""
    shape = (2, images.channels, images.size, images.size)
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model.eval()(torch.zeros(shape))
    except RuntimeError as error:
        raise RunError(f"--dnn {name} does not take images {shape} ({error})") from None
    model.train(training)
    found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if found != (2, images.classes):
        raise RunError(
            f"--dnn {name} makes {found} of images {shape}, expected logits of shape {(2, images.classes)}, "
            f"a number for each class"
        )
