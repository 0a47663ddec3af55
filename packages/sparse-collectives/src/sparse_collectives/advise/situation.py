"""Basis of the advice: costs measured on the ranks that the command was started with, or assumed."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from communicators import Alone, Communicator, Link, as_communicator, measure_link
from sparse_compress import TopK

from sparse_collectives.advise.accuracy import Known, known, within_a_point
from sparse_collectives.advise.all_or_none import NoAdvice, all_or_none
from sparse_collectives.advise.busy import share_taken
from sparse_collectives.advise.factory import model_seconds
from sparse_collectives.advise.flags import LINKS
from sparse_collectives.advise.warm_up import shares
from sparse_collectives.prediction.calibration import measure_handling, measure_traffic
from sparse_collectives.prediction.cost import (
    BACKWARD_SHARE,
    Handling,
    Prediction,
    predict,
    predict_all,
    step_seconds,
    with_whole,
)
from sparse_collectives.wire import WIRES


class Step(NamedTuple):
    """seconds: of a training step with this exchange, after the warm-up. mean: of a step over the whole training."""

    prediction: Prediction
    seconds: float
    mean: float


Steps = list[Step]


@dataclass(frozen=True)
class Situation:
    """numel: trained parameters. ranks: P. device: where gradients are.

    compute: seconds of forward and backward. hidden: seconds of them during which buckets travel, 0 without overlap.
    link: α and β of the exchange. link_name: as given, "given" for one's own, or "measured". pairs: α and β of
    ping-pong in pairs, if measured. handling: a rank's own costs by density. taken: the share of the time that others
    had the cores meanwhile, see `share_taken`. optimizer: one of `OPTIMIZERS`. tiny: elements of tensors of fewer than
    `TINY`, which are summed whole beside a selection from updates; of numbers without a model they are not known.
    chosen: the densities are the user's own, not the usual ones.
    """

    numel: int
    ranks: int
    device: str
    compute: float
    hidden: float
    link: Link
    link_name: str
    pairs: Link | None
    handling: dict[float, Handling]
    taken: float = 0.0
    optimizer: str = "sgd"
    tiny: int = 0
    chosen: bool = False

    @property
    def sends_updates(self) -> bool:
        """Whether the optimizer's updates are sent, which exist only after backward has ended.

        With SGD a DDP hook may send gradients during backward, unless that is known to learn badly on this many ranks.
        """
        if self.optimizer != "sgd":
            return True
        hook = known("sgd", "gtopk", 0.01, "fp32", self.ranks, sends="gradients")
        return hook is not None and not within_a_point(hook)

    def known(self, p: Prediction) -> Known | None:
        """Measured accuracy of an exchange in this situation."""
        sends = "updates" if self.sends_updates else "gradients"
        return known(self.optimizer, p.algorithm, p.density, p.wire, self.ranks, sends=sends)

    def predictions(self) -> Steps:
        """All exchanges, the fastest over a whole training first; of each only the variant with the fastest steps.

        Their wires are those on which merging was measured, and fp32. Their densities are those of `handling`, not
        k/n, which whole entries make a little other.
        """
        found = predict_all(size=self.ranks, numel=self.numel, link=self.link, handling=self.handling)
        if self.sends_updates:
            found = [with_whole(p, self.tiny, size=self.ranks, link=self.link) for p in found]
        fastest: dict[tuple[str, float, str], Prediction] = {}
        for p in sorted(map(self._as_asked, found), key=lambda p: self._seconds(p, self._hides(p))):
            fastest.setdefault((p.algorithm, p.density, p.wire), p)
        return sorted(map(self._step, fastest.values()), key=lambda step: step.mean)

    def _as_asked(self, prediction: Prediction) -> Prediction:
        if prediction.density == 1:
            return prediction
        return replace(prediction, density=min(self.handling, key=lambda density: abs(density - prediction.density)))

    def _step(self, prediction: Prediction) -> Step:
        """Step times of an exchange, including the recommended warm-up; dense gradients have none."""
        own, hides = prediction.density, self._hides(prediction)
        seconds = self._seconds(prediction, hides)
        if own == 1:
            return Step(prediction, seconds, seconds)
        mean = sum(
            share * (seconds if density == own else self._seconds(self._sending(prediction, density), hides))
            for density, share in shares(own).items()
        )
        return Step(prediction, seconds, mean)

    def _seconds(self, prediction: Prediction, hides: float) -> float:
        return step_seconds(prediction, compute=self.compute, backward=hides)

    def _hides(self, prediction: Prediction) -> float:
        return 0.0 if self.sends_updates and prediction.density < 1 else self.hidden

    def _sending(self, like: Prediction, density: float) -> Prediction:
        """An exchange during the warm-up. Density 1 is a dense sum, whatever the algorithm and wire.

        An element and an entry cost what they were measured to at the density that the warm-up ends at.
        """
        given: dict[str, Any] = {"size": self.ranks, "numel": self.numel, "link": self.link}
        if density == 1:
            return predict("dense", k=self.numel, **given)
        settings: dict[str, Any] = {"options": like.options, "wire": like.wire, "handling": self.handling[like.density]}
        found = predict(like.algorithm, k=TopK(density).entries(self.numel), **settings, **given)
        return with_whole(found, self.tiny, size=self.ranks, link=self.link) if self.sends_updates else found

    def elsewhere(self, *, link: Link | None = None, ranks: int | None = None) -> Situation:
        """The same training on another network."""
        return replace(self, link=link or self.link, ranks=ranks or self.ranks)


def join(flags: argparse.Namespace) -> Communicator:
    """The ranks that a launcher started: torchrun's over gloo, else MPI's where mpi4py is there. Raises NoAdvice.

    For an assumed link this rank alone.
    """
    if flags.assumed:
        return Alone()
    if dist.is_available() and dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        with contextlib.suppress(ImportError, RuntimeError):  # RuntimeError: mpi4py is there, an MPI library is not
            from mpi4py import MPI  # noqa: F401 - its import is what as_communicator looks for
    try:
        comm = as_communicator(None)
    except RuntimeError as error:
        raise NoAdvice(str(error)) from error
    if comm.size == 1:
        raise NoAdvice(
            "one rank: there is no network to measure. Start several with mpiexec -n P (needs mpi4py) or "
            f"torchrun --nproc-per-node P, or assume a network: --link {'|'.join(LINKS)} --ranks P"
        )
    return comm


def find_out(flags: argparse.Namespace, comm: Communicator, say: Callable[[str], None]) -> Situation:
    """The situation, alike on every rank. Collective. say: is told what is being measured. Raises NoAdvice on all."""
    device = all_or_none(lambda: _device(flags.device, comm), comm)
    taken = [share_taken(comm)]
    if flags.model:
        say(f"measuring forward and backward of {flags.model}")
        numel, tiny, compute, backward = model_seconds(flags.model, comm, device)
    else:
        numel, tiny, compute, backward = flags.parameters, 0, flags.step_seconds, BACKWARD_SHARE * flags.step_seconds
    costs: dict[str, Any] = {"numel": numel, "device": device, "size": flags.ranks or comm.size, "wires": WIRES}
    handling = {}
    for number, density in enumerate(flags.density, 1):
        say(f"measuring selecting and merging at density {density:g} ({number} of {len(flags.density)})")
        handling[density] = measure_handling(comm, density=density, **costs)
        taken.append(share_taken(comm))
    if not flags.assumed:
        say(f"measuring the link between {comm.size} ranks")
    return Situation(
        numel=numel,
        ranks=flags.ranks or comm.size,
        device=device.type,
        compute=compute,
        hidden=0.0 if flags.no_overlap else backward,
        link=flags.assumed or measure_traffic(comm),
        link_name=(flags.link or "given") if flags.assumed else "measured",
        pairs=None if flags.assumed else measure_link(comm),
        handling=handling,
        taken=statistics.mean(taken),
        optimizer=flags.optimizer,
        tiny=tiny,
        chosen=flags.chosen,
    )


def _device(name: str | None, comm: Communicator) -> torch.device:
    if name is None and torch.cuda.is_available():
        return torch.device("cuda", comm.rank % torch.cuda.device_count())
    try:
        return torch.empty(0, device=name or "cpu").device
    except (RuntimeError, AssertionError) as error:
        raise NoAdvice(f"--device {name}: {str(error).partition(chr(10))[0]}") from error
