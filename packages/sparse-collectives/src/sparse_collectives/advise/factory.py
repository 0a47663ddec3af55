"""--model MODULE:FACTORY: the user's model, and what its steps take."""

from __future__ import annotations

import importlib
import statistics
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from communicators import Communicator

from sparse_collectives.advise.all_or_none import NoAdvice, all_or_none
from sparse_collectives.prediction.calibration import slowest

REPEATS = 3
TINY = 256
"""Elements: tensors of fewer are summed whole where updates are sent, as the advice is (`dense_below`)."""
Loss = Callable[[], torch.Tensor]


def model_seconds(name: str, comm: Communicator, device: torch.device) -> tuple[int, int, float, float]:
    """Size of the user's model, and the duration of the slowest rank's step.

    Returns the number of trained parameters, the number of those in tensors of fewer than `TINY` elements, seconds of
    forward and backward, and seconds of backward. Collective. Raises NoAdvice on all ranks if the user's code fails on
    any.
    """
    model, loss = all_or_none(lambda: _made(name, device), comm)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    most, least = slowest([numel, -numel], comm)
    if most != -least:
        raise NoAdvice(
            f"--model {name}: {-least:,.0f} to {most:,.0f} trained parameters, expected as many on all ranks"
        )
    if not numel:
        raise NoAdvice(f"--model {name}: no parameter of the model requires a gradient")
    times = [all_or_none(lambda: _step_seconds(name, model, loss, comm, device), comm) for _ in range(REPEATS + 1)]
    forward, backward = slowest([statistics.median(part) for part in zip(*times[1:], strict=True)], comm)
    tiny = sum(p.numel() for p in model.parameters() if p.requires_grad and p.numel() < TINY)
    return numel, tiny, forward + backward, backward


def _made(name: str, device: torch.device) -> tuple[torch.nn.Module, Loss]:
    """Calls FACTORY(), and checks its result."""
    module, _, factory = name.partition(":")
    with _users(name, f"importing {module}"):
        imported = importlib.import_module(module)
    if not callable(make := getattr(imported, factory, None)):
        raise NoAdvice(f"--model {name}: {imported.__file__} has no function {factory}")
    with _users(name, f"{factory}()"), device:
        made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        raise NoAdvice(f"--model {name}: it returned {type(made).__name__}, expected (model, loss); see --help")
    return made


def _step_seconds(
    name: str, model: torch.nn.Module, loss: Loss, comm: Communicator, device: torch.device
) -> tuple[float, float]:
    """Forward and backward once."""
    model.zero_grad()
    begin = _now(comm, device)
    with _users(name, "loss()"):
        value = loss()
    middle = _now(comm, device)
    with _users(name, "backward of what loss() returned"):
        value.backward()  # type: ignore[no-untyped-call]
    return middle - begin, _now(comm, device) - middle


@contextmanager
def _users(name: str, doing: str) -> Iterator[None]:
    """Reports errors of the user's code in one line, with its file and line instead of our traceback.

    What it prints goes to stderr, because stdout is the advice.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        text = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().partition("\n")[0]
        said = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise NoAdvice(f"--model {name}: {doing} raised {said}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """Location of the last frame outside installed packages and this one, or of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    others = [*installed, Path(torch.__file__).parent, Path(__file__).parents[1]]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not any(Path(frame.filename).is_relative_to(at) for at in others)
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _now(comm: Communicator, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return comm.clock()
