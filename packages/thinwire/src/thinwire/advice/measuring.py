"""Costs measured on the ranks that the command was started with: the user's model, selecting, merging and the link."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from communicators import Alone, Communicator, Link, allgather, as_communicator, barrier, measure_link, measure_paths
from sparse_collectives import WIRES, prediction
from torch.nn.parameter import is_lazy

from thinwire.advice.accuracy import data_of
from thinwire.advice.own_work import measure_around, measure_work
from thinwire.advice.situation import LINKS, TINY, Situation, with_around
from thinwire.advice.stragglers import Stragglers
from thinwire.advice.ways import Shapes, Work, assumed_shapes, elements, torch_sum

T = TypeVar("T")
Loss = Callable[[], torch.Tensor]
Clock = Callable[[], float]
REPEATS = 3
LATE_REPEATS = 20
"""Steps by which late ranks are known, where they are measured."""
PROBE_SECONDS = 0.1
PATH_BYTES = 1 << 17
SHORT = 1000
"""Elements of a short sum, of which every rank has some."""


class NoAdvice(Exception):  # noqa: N818 - it is what the command says
    """No advice can be given; the text says why and what to do."""


def join(link: Link | None, comm: Any = None) -> Communicator:
    """The ranks that torchrun (over gloo) or mpiexec started; for an assumed link this one alone. Raises NoAdvice.

    comm: them, if they are given.
    """
    if link is not None:
        return Alone()
    if comm is None and dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("gloo")
    else:
        with contextlib.suppress(ImportError, RuntimeError):  # RuntimeError: mpi4py is there, an MPI library is not
            from mpi4py import MPI  # noqa: F401 - its import is what as_communicator looks for
    try:
        found = as_communicator(comm)
    except RuntimeError as error:
        raise NoAdvice(str(error)) from error
    if found.size == 1:
        raise NoAdvice(
            "one rank: there is no network to measure. Start several with mpiexec -n P (needs mpi4py) or torchrun "
            f"--nproc-per-node P, or assume a network: --link {'|'.join(LINKS)} --ranks P"
        )
    return found


def told(own: Any, comm: Communicator) -> list[Any]:
    """Plain values of every rank, in rank order. Collective."""
    message = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    return [json.loads(bytes(each.tolist())) for each in allgather(message.to(comm.device), comm)]


def on_every_rank(attempt: Callable[[], T], comm: Communicator, kind: type[Exception] = NoAdvice) -> T:
    """The attempt's result; collective. If it raises such an error on any rank, all raise the first one's reason."""
    own, reason = None, ""
    try:
        result = attempt()
    except kind as error:
        own, reason = error, str(error)
    for rank, said in enumerate(told(reason, comm)):
        if said:
            raise kind(f"rank {rank}: {said}" if comm.size > 1 else said) from own
    return result


class Trained(NamedTuple):
    """Training that is asked about.

    shapes: of the trained parameters. tiny: elements in tensors of fewer than `TINY`, as far as known. compute: seconds
    of forward and backward. backward: seconds of backward. times: seconds of some of this rank's steps, from which late
    ranks are to be known. data: see `accuracy.data_of`.
    """

    shapes: Shapes
    tiny: int
    compute: float
    backward: float
    times: tuple[float, ...] = ()
    data: str = ""

    @classmethod
    def of(cls, shapes: Shapes, step_seconds: float) -> Trained:
        """Training of tensors whose shapes are known; the usual share of a step is taken for backward."""
        tiny = sum(shape.numel() for shape in shapes if shape.numel() < TINY)
        return cls(shapes, tiny, step_seconds, prediction.BACKWARD_SHARE * step_seconds)

    @classmethod
    def of_numbers(cls, parameters: int, step_seconds: float) -> Trained:
        """Training of a number of parameters, in tensors of which nothing is known."""
        return cls.of(assumed_shapes(parameters), step_seconds)._replace(tiny=0)


def find_out(
    trained: Trained,
    comm: Communicator,
    say: Callable[[str], None],
    *,
    device: torch.device,
    ranks: int,
    densities: Sequence[float],
    link: Link | None,
    link_name: str,
    overlap: bool,
    stragglers: Stragglers | None = None,
    **asked: Any,
) -> Situation:
    """The situation, alike on every rank. Collective.

    say: is told what is being measured. link: assumed; None: it is measured. stragglers: assumed. asked: the other
    fields of `Situation`.
    """
    taken, handling, numel = [share_taken(comm)], {}, elements(trained.shapes)
    compute, backward = prediction.slowest([trained.compute, trained.backward], comm)
    if trained.times:
        times = told(trained.times, comm)
        least, stragglers = min(map(min, times)), Stragglers.measured(times)
        compute, backward = least, backward * least / compute
    costs: dict[str, Any] = {"numel": numel, "device": device, "size": ranks, "wires": WIRES}
    for number, density in enumerate(densities, 1):
        say(f"measuring selecting and merging at density {density:g} ({number} of {len(densities)})")
        handling[density] = prediction.measure_handling(comm, density=density, **costs)
        taken.append(share_taken(comm))
    say("measuring the work of the other ways")
    work = slowest_work(measure_work(trained.shapes, device), comm)
    network: dict[str, Any] = {"link": link, "link_name": link_name}
    if link is None:
        say(f"measuring the link between {comm.size} ranks")
        network = {
            "link": prediction.measure_traffic(comm),
            "link_name": "measured",
            "pairs": measure_link(comm, repeats=REPEATS),
            "paths": measure_paths(comm, nbytes=PATH_BYTES, repeats=1),
            "torch_alpha": measure_torch_alpha(comm),
        }
    found = Situation(
        numel,
        ranks,
        device.type,
        compute,
        backward if overlap else 0.0,
        handling=handling,
        taken=statistics.mean(taken),
        tiny=trained.tiny,
        shapes=trained.shapes,
        work=work,
        stragglers=stragglers,
        **network,
        **asked,
    )
    return _with_all_around(found, comm, say) if handling and found.sends_updates else found


def measure_torch_alpha(comm: Communicator) -> float | None:
    """Seconds of each message of a short sum by torch, as DDP makes it. Collective.

    None where torch knows of no group of all ranks, or of none that sums on the communicator's device.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == comm.size > 1):
        return None
    if f"{comm.device.type}:" not in dist.get_backend_config():
        return None
    short = torch.zeros(SHORT, dtype=torch.float32, device=comm.device)
    seconds = prediction.slowest([prediction.seconds_of(lambda: dist.all_reduce(short), comm, comm.device)], comm)[0]
    return seconds / torch_sum(0, comm.size).messages


def _with_all_around(found: Situation, comm: Communicator, say: Callable[[str], None]) -> Situation:
    """The situation, in which selecting takes what it does inside the optimizer that is advised. Collective."""
    say("measuring the optimizer around a selection")
    density, own = next(iter(found.handling.items()))
    asked: dict[str, Any] = {"optimizer": found.optimizer, "density": density}
    [seconds] = prediction.slowest([measure_around(found.shapes, torch.device(found.device), **asked)], comm)
    return replace(found, handling=with_around(found.handling, max(0.0, seconds - own.compress)))


def slowest_work(own: Mapping[str, Work], comm: Communicator) -> dict[str, Work]:
    """Each way's work on the rank that it takes longest. Collective."""
    numbers = prediction.slowest([number for work in own.values() for number in work], comm)
    return {name: Work(*numbers[2 * at : 2 * at + 2]) for at, name in enumerate(own)}


def share_taken(comm: Communicator, *, clock: Clock = time.perf_counter, cpu: Clock = time.thread_time) -> float:
    """Share of time, 0 … 1, for which the scheduler let others run while all ranks did nothing but compute.

    Collective; returns the share of the rank that was held up most. Load averages lag by a minute and count our own
    ranks; this counts what disturbs a measurement: other programs, a container's quota that is too small, more ranks
    than cores. Programs on other cores do not count.
    """
    barrier(comm)
    begin, had = clock(), cpu()
    while clock() - begin < PROBE_SECONDS:
        pass
    wall, run = clock() - begin, cpu() - had
    return prediction.slowest([max(0.0, 1 - run / wall)], comm)[0]


def measured_model(name: str, comm: Communicator, device: torch.device, *, late: bool = False) -> Trained:
    """The user's model with the seconds of the slowest rank's step; of more steps, where late ranks are to be known.

    Collective. Raises NoAdvice on all ranks if the user's code fails on any.
    """
    model, loss = on_every_rank(lambda: _made(name, device), comm)
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    most, least = prediction.slowest([elements(shapes), -elements(shapes)], comm)
    if most != -least:
        found = f"{-least:,.0f} to {most:,.0f} trained parameters"
        raise NoAdvice(f"--model {name}: {found}, expected as many on all ranks")
    if not most:
        raise NoAdvice(f"--model {name}: no parameter of the model requires a gradient")
    if said := other_dtype(model):
        raise NoAdvice(f"--model {name}: {said}")
    step = partial(_step_seconds, name, model, loss, comm, device)
    times = [on_every_rank(step, comm) for _ in range((LATE_REPEATS if late else REPEATS) + 1)]
    forward, backward = prediction.slowest([statistics.median(part) for part in zip(*times[1:], strict=True)], comm)
    seconds = tuple(map(sum, times[1:])) if late else ()
    more: dict[str, Any] = {"times": seconds, "data": data_of(model)}
    return Trained.of(shapes, forward + backward)._replace(backward=backward, **more)


def other_dtype(model: torch.nn.Module) -> str:
    """Complaint about trained parameters that are not float32, of which nothing is predicted; "" if there are none."""
    named = (name for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32)
    first = next(named, None)
    if first is None:
        return ""
    dtype = str(model.get_parameter(first).dtype).removeprefix("torch.")
    return f"{first} is {dtype}, but predictions are of float32: ask with a float32 model, whose exchanges take longer"


def shapeless(model: torch.nn.Module) -> str:
    """Complaint about parameters of lazy layers, which get a shape by the first batch; "" if there are none."""
    first = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    return f"{first} of a lazy layer has no shape yet: run one batch through the model first" if first else ""


def _made(name: str, device: torch.device) -> tuple[torch.nn.Module, Loss]:
    """Calls FACTORY(), and checks its result."""
    module, _, factory = name.partition(":")
    if os.getcwd() not in sys.path:  # of the installed script, not of `python -m`
        sys.path.insert(0, os.getcwd())
    with _users(name, f"importing {module}"):
        imported = importlib.import_module(module)
    if not callable(make := getattr(imported, factory, None)):
        raise NoAdvice(f"--model {name}: {imported.__file__} has no function {factory}")
    with _users(name, f"{factory}()"), device:
        made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        raise NoAdvice(f"--model {name}: it returned {type(made).__name__}, expected (model, loss); see --help")
    if said := shapeless(made[0]):
        raise NoAdvice(f"--model {name}: {said}")
    return made


def _step_seconds(
    name: str, model: torch.nn.Module, loss: Loss, comm: Communicator, device: torch.device
) -> tuple[float, float]:
    """Seconds of one forward and of one backward."""
    clock = prediction.clock_of(comm, device)
    model.zero_grad()
    begin = clock()
    with _users(name, "loss()"):
        value = loss()
    middle = clock()
    with _users(name, "backward of what loss() returned"):
        value.backward()  # type: ignore[no-untyped-call]
    return middle - begin, clock() - middle


@contextlib.contextmanager
def _users(name: str, doing: str) -> Iterator[None]:
    """Reports errors of the user's code in one line, with its file and line instead of our traceback.

    What it prints goes to stderr, because stdout is the advice.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        text = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().partition("\n")[0]
        said = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise NoAdvice(f"--model {name}: {doing} raised {said}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """Location of the last frame outside installed packages and this one, or of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    here = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    others = ("<", *(path + os.sep for path in (*installed, *here)))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def device_of(name: str | None, comm: Communicator) -> torch.device:
    """Device of that name; default this rank's GPU where there is one. Raises NoAdvice where there is none of it."""
    if name is None and torch.cuda.is_available():
        return torch.device("cuda", comm.rank % torch.cuda.device_count())
    if name == "meta":
        raise NoAdvice("--device meta: nothing can be measured there; give the device that trains")
    try:
        return torch.empty(0, device=name or "cpu").device
    except (RuntimeError, AssertionError) as error:
        raise NoAdvice(f"--device {name}: {str(error).partition(chr(10))[0]}") from error
