"""The training that is asked about, and the time of its steps with every exchange."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from communicators import Link, Paths
from sparse_collectives import ALGORITHMS, Handling, Prediction, prediction
from sparse_compress import TopK

from thinwire.advice.accuracy import MOST_BEHIND, Known, known, shares
from thinwire.advice.stragglers import Stragglers
from thinwire.advice.ways import BY_NAME, DENSE, TORCH_POWERSGD, WAYS, WHOLE, Shapes, Way, Work, torch_sum

LINKS = {
    "100mbit": Link(200e-6, 80e-9),
    "1gbit": Link(50e-6, 8e-9),
    "10gbit": Link(30e-6, 0.8e-9),
    "25gbit": Link(15e-6, 0.32e-9),
    "100gbit": Link(5e-6, 0.08e-9),
    "wan": Link(30e-3, 80e-9),
}
"""Usual α and β: Ethernet in one room; wan is 100 Mbit/s and 30 ms between sites."""
DENSITIES = (0.01, 0.001)
MOST_RANKS = 4096
"""Predictions for so many take seconds, and take O(P)."""
INT8 = "dense-int8"
TINY = 256
"""Elements: tensors of fewer are summed whole where updates are sent, as the advice is (`dense_below`)."""


def with_around(handling: Mapping[float, Handling], seconds: float) -> dict[float, Handling]:
    """The costs, with so many seconds more for an element of every selection."""
    return {
        density: own._replace(
            compress=own.compress + seconds,
            prescribed={name: each + seconds for name, each in own.prescribed.items()},
        )
        for density, own in handling.items()
    }


class Step(NamedTuple):
    """seconds: of a training step with this exchange, after the warm-up. mean: of a step over the whole training.

    until: seconds until it is as good as dense gradients are at the end, for each step that these take until then; the
    mean where it is not known to get there.
    """

    prediction: Prediction
    seconds: float
    mean: float = 0.0
    until: float = 0.0


@dataclass(frozen=True)
class Situation:
    """numel: trained parameters. ranks: P. device: where gradients are.

    compute: seconds of forward and backward. hidden: seconds of them during which buckets travel, 0 without overlap.
    link: α and β of the exchange. link_name: as given, "given" for one's own, or "measured". pairs: α and β of
    ping-pong in pairs, and paths between all ranks, if measured. handling: a rank's own costs by density. taken: the
    share of the time that others had the cores meanwhile, see `share_taken`. optimizer: "sgd", "adam", "adamw" or
    "muon". tiny: elements of tensors of fewer than `TINY`, which are summed whole beside a selection from updates;
    of numbers without a model they are not known. chosen: the densities are the user's own, not the usual ones.
    shapes: of the trained parameters. work: a rank's own in the ways that select no entries, by name, see
    `measure_work`; those without are not predicted. stragglers: how late ranks are, for which `compute` has no time;
    None: nobody is. plain: the model that was given is not in DDP, so that ways of DDP alone are passed over.
    data: one of `accuracy.DATA`, by whose trainings ways are judged. torch_alpha: seconds of each
    message of a short sum by torch, see `torch_sum`, if measured.
    """

    numel: int
    ranks: int
    device: str
    compute: float
    hidden: float
    link: Link
    link_name: str
    pairs: Link | None = None
    handling: dict[float, Handling] = field(default_factory=dict)
    taken: float = 0.0
    optimizer: str = "sgd"
    tiny: int = 0
    chosen: bool = False
    shapes: Shapes = ()
    work: Mapping[str, Work] = field(default_factory=dict)
    paths: Paths | None = None
    stragglers: Stragglers | None = None
    plain: bool = False
    data: str = ""
    torch_alpha: float | None = None

    @property
    def torch_link(self) -> Link:
        """Its α is such that a short sum by torch takes what was measured; else that of gloo, or of NCCL's trees."""
        if self.torch_alpha is not None:
            return replace(self.link, alpha=self.torch_alpha)
        ring, trees = max(1, torch_sum(0, self.ranks).rounds), 2 * math.ceil(math.log2(self.ranks))
        return replace(self.link, alpha=self.link.alpha * (1 if self.device == "cpu" else trees / ring))

    @cached_property
    def sends_updates(self) -> bool:
        """Whether the optimizer's updates are sent, which exist only after backward has ended.

        With SGD a DDP hook may send gradients during backward, unless that is known to learn badly on this many ranks,
        or to take more steps. A model that is not in DDP has no such hook.
        """
        if self.plain or self.optimizer != "sgd":
            return self.optimizer != "muon"
        of = partial(known, "sgd", "gtopk", 0.01, "fp32", self.ranks, data=self.data)
        hook, updates = of(sends="gradients"), of(sends="updates")
        if hook is None or hook.most > MOST_BEHIND:
            return hook is not None
        return updates is not None and (updates.pace or math.inf) < (hook.pace or math.inf)

    def known(self, p: Prediction) -> Known | None:
        """Measured accuracy of an exchange in this situation; None for whole gradients, or where nobody measured it."""
        if p.algorithm in WHOLE:
            return None
        if p.variant in BY_NAME:
            return known(self.optimizer, p.variant, p.density, p.wire, self.ranks, sends="gradients", data=self.data)
        sends = "updates" if self.sends_updates else "gradients"
        return known(self.optimizer, p.algorithm, p.density, p.wire, self.ranks, sends=sends, data=self.data)

    def predictions(self) -> list[Step]:
        """All exchanges, the soonest as good as dense first; of each only the variant with the fastest steps.

        Wires are those on which merging was measured, and fp32; densities those of `handling`, not k/n. Nothing is
        selected for Muon, which would make noise of what a selection leaves out.
        """
        found: dict[tuple[str, float, str], Step] = {}
        handling = {} if self.optimizer == "muon" else self.handling
        for p in prediction.predict_all(handling=handling, **self._exchange()):
            if p.algorithm == DENSE.name:
                p = self._by_ddp(p) if p.wire == "fp32" and not self.plain else self._by_us(p)
            nearest = sorted((abs(own - p.density), own) for own in self.handling)
            asked = 1.0 if p.density == 1 else nearest[0][1]
            if p.density == 1 and p.algorithm != "dense":  # a selection of all of few elements
                continue
            p = replace(self._with_tiny(p), density=asked)
            key, seconds = (p.algorithm, asked, p.wire), self._seconds(p, asked)
            if key not in found or seconds < found[key].seconds:
                found[key] = Step(p, seconds)
        steps = sorted([*found.values(), *self._others()], key=lambda step: step.seconds)
        return sorted(map(self._over_a_training, steps), key=lambda step: step.until)

    def _others(self) -> list[Step]:
        """Ways that select no entries. Torch's PowerSGD fails at parameters without a dimension."""
        found, scalar = [], () in self.shapes
        for way in WAYS:
            fails = scalar and way.algorithm == TORCH_POWERSGD
            if way.name in self.work and self.optimizer in way.optimizers and not fails:
                p = self._of(way, self.work[way.name])
                found.append(Step(p, self._of_way(way, p)))
        return found

    def _of(self, way: Way, work: Work) -> Prediction:
        link = self.torch_link if way.ddp_only else self.link
        return way.predict(self.shapes, size=self.ranks, link=link, work=work)

    def _by_ddp(self, dense: Prediction) -> Prediction:
        """A sum of gradients, by torch, which has no work but that."""
        sent = torch_sum(4 * self.numel, self.ranks)
        return replace(dense, compression=0.0, **prediction.network_seconds([sent], [0.0], self.torch_link))

    def _by_us(self, dense: Prediction) -> Prediction:
        return replace(dense, compression=self.numel * self.work.get(DENSE.name, Work()).fixed)

    def overlaps(self, way: Way) -> bool:
        """Whether its buckets travel during backward, in DDP or by `overlap` of the optimizer."""
        return way.early and self.hidden > 0

    def _of_way(self, way: Way, p: Prediction) -> float:
        """Seconds of a step. Steps may hide what is exchanged meanwhile, and that ranks began it late by chance.

        First order: hidden as if the means of delays were what every block has.
        """
        if way.quorum and self.stragglers:
            return self.stragglers.eager(self.ranks, way.quorum, compute=self.compute, exchange=p.seconds)
        backward = self.hidden if self.overlaps(way) else 0.0
        seconds = prediction.step_seconds(p, compute=self.compute, backward=backward)
        late, unwaited = self._late(way.every), self.stragglers.slowest(self.ranks) if self.stragglers else 0.0
        return seconds + late - min(way.hides * self.compute, p.latency + p.transfer + late - unwaited)

    def _late(self, every: int = 1) -> float:
        """Seconds that late ranks add to a step of ranks that wait for all after every so many."""
        return self.stragglers.late(self.ranks, every=every) if self.stragglers else 0.0

    def _over_a_training(self, step: Step) -> Step:
        mean, found = self._mean(step), self.known(step.prediction)
        if found is None or found.pace is None or found.most > MOST_BEHIND:
            return step._replace(mean=mean, until=mean)
        return step._replace(mean=mean, until=found.pace * self._mean(step, found.pace * found.dense))

    def _mean(self, step: Step, until: float = 1.0) -> float:
        """Seconds of a step in the first `until` of a training, the recommended warm-up included; dense has none."""
        p = step.prediction
        if p.algorithm not in ALGORITHMS or p.density == 1:
            way = BY_NAME.get(p.variant)
            whole = min(1.0, way.dense_share / until) if way else 0.0
            first = self._sending(p, 1.0)
            dense = self._seconds(self._by_ddp(first) if way and way.ddp_only else first, 1.0) if whole else 0.0
            if way and way.every > 1 and not way.ddp_only:  # an exchange of its own after every step
                dense = self.compute + way.every * p.seconds + self._late()
            return whole * dense + (1 - whole) * step.seconds
        sent = shares(p.density, until).items()
        return sum(share * self._seconds(self._sending(p, density), p.density) for density, share in sent)

    def _sending(self, like: Prediction, density: float) -> Prediction:
        """An exchange during the warm-up. Density 1 is a dense sum, in int8 where the wire is.

        An element and an entry cost what they were measured to at the density that the warm-up ends at.
        """
        if density == 1 and like.wire.startswith("int8") and INT8 in self.work:
            return self._of(BY_NAME[INT8], self.work[INT8])
        if density == 1:
            return self._by_us(prediction.predict("dense", k=self.numel, **self._exchange()))
        own: dict[str, Any] = {"options": like.options, "handling": self.handling[like.density], "wire": like.wire}
        k = TopK(density).entries(self.numel)
        return self._with_tiny(prediction.predict(like.algorithm, k=k, **own, **self._exchange()))

    def _seconds(self, p: Prediction, target: float) -> float:
        """Seconds of a step; of a training whose density is or becomes `target`, updates wait for backward's end."""
        hidden = 0.0 if self.sends_updates and target < 1 else self.hidden
        return prediction.step_seconds(p, compute=self.compute, backward=hidden) + self._late()

    def _with_tiny(self, p: Prediction) -> Prediction:
        return prediction.with_whole(p, self.tiny if self.sends_updates else 0, size=self.ranks, link=self.link)

    def _exchange(self) -> dict[str, Any]:
        return {"size": self.ranks, "numel": self.numel, "link": self.link}
