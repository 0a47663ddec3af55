"""Accuracy measured for training with an exchange (the record of `python -m bench convergence`).

`accuracy.json` is written by that command (`--accuracy FILE`), never by hand.
"""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.resources import files
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from sparse_compress import WarmUp
from torch import nn

Row = dict[str, Any]
DATA = ("images", "images/convolutional", "images/transformer", "text", "text/recurrent", "text/transformer", "")
"""What tasks are of: data, or data/models; "" stands for all."""
EXCHANGE = ("optimizer", "algorithm", "density", "wire", "sends")
MOST_BEHIND = 1.0
"""Points of accuracy, of text percent of perplexity: what is known to lose more is not advised unasked."""

FEWEST_TASKS, FEWEST_SEEDS = 2, 3
"""What learned well on fewer tasks is taken for unknown, but for the only one of its kind in enough seeds."""


class Known(NamedTuple):
    """Measured accuracy of an exchange.

    least, most: over the tasks, points of accuracy behind dense (for text: percent of perplexity), means of seeds.
    tasks: their names. seeds: of the task with the fewest. ranks: number of ranks that trained each task. until, dense:
    share of a training's steps after which it is as good as dense at the end, less a point (of text: 1 % of the loss),
    and after which dense is; means of the tasks, None if on any of them it never is. data: the kind that they are of.
    few: it is one task, though its optimizer was tried with others of that kind, or in few seeds.
    """

    least: float
    most: float
    tasks: tuple[str, ...]
    seeds: int
    ranks: tuple[int, ...]
    until: float | None = 1.0
    dense: float = 1.0
    data: str = ""
    few: bool = False

    @property
    def pace(self) -> float | None:
        """Steps until then for each one of dense. At least 1: a way is taken for its bytes, not for how it learns."""
        return None if self.until is None else max(1.0, self.until / self.dense)


def known(
    optimizer: str, algorithm: str, density: float, wire: str, ranks: int, *, sends: str = "updates", data: str = ""
) -> Known | None:
    """Measured accuracy of an exchange with the recommended settings for that optimizer; None if it was not measured.

    data: one of `DATA`, whose tasks count alone; where there are too few, those on the same data with all kinds of
    models; where that optimizer was not tried on such data at all, all tasks.

    For each task, uses the measured number of ranks nearest to `ranks` by ratio, and the larger of two that are equally
    near, because most tasks lose more on more ranks. Of the trainings on that many ranks it uses the longest: residuals
    wait as many steps in a short training, which is a larger share of it.
    """
    rows, kinds = _record().get((optimizer, algorithm, density, wire, sends), []), _wider(judged(optimizer, data))
    found = None
    for kind in kinds:
        found = _known(rows, ranks, kind) or found
        if found is not None and not found.few:
            break
    return found


def _known(rows: Iterable[Row], ranks: int, data: str) -> Known | None:
    """Accuracy by the tasks of one kind."""
    by_task = _grouped((row for row in rows if _within(row["data"], data)), itemgetter("task"))
    if not by_task:
        return None
    taken = [
        min(rows, key=lambda row: (max(row["ranks"] / ranks, ranks / row["ranks"]), -row["ranks"], -row["steps"]))
        for rows in by_task.values()
    ]
    behind, seeds = [row["behind"] for row in taken], min(row["seeds"] for row in taken)
    dense, shares_until = statistics.mean(row["dense_until"] for row in taken), [row["until"] for row in taken]
    until, ranks_of = None if None in shares_until else statistics.mean(shares_until), tuple(r["ranks"] for r in taken)
    few = len(by_task) < FEWEST_TASKS and (seeds < FEWEST_SEEDS or len(set(_tasks(taken[0]["optimizer"], data))) > 1)
    return Known(min(behind), max(behind), tuple(by_task), seeds, ranks_of, until, dense, data, few)


def data_of(model: nn.Module) -> str:
    """Kind of a training by the model's layers, one of `DATA`; "" where they do not say, or say several data.

    An `Embedding` says text, a `Conv2d` images. Classes named after LSTM, GRU or RNN make a model recurrent; after
    attention, transformers, `LayerNorm` or `RMSNorm` a transformer; a `Conv2d`, of which a transformer has one at most,
    convolutional. Where kinds of models mix, the data alone are said.
    """
    modules = list(model.modules())
    convolutions = sum(isinstance(module, nn.Conv2d) for module in modules)
    text = any(isinstance(module, nn.Embedding) for module in modules)
    if text == bool(convolutions):
        return ""
    names = " ".join(type(module).__name__ for module in modules)
    recurrent = any(part in names for part in ("LSTM", "GRU", "RNN"))
    attends = any(part in names for part in ("Attention", "Transformer"))
    transformer = attends or (not recurrent and any(part in names for part in ("LayerNorm", "RMSNorm")))
    convolutional = convolutions > 1 or (convolutions == 1 and not (recurrent or transformer))
    kinds = {"recurrent": recurrent, "transformer": transformer, "convolutional": convolutional}
    models = [kind for kind, found in kinds.items() if found]
    data = "text" if text else "images"
    return kind if len(models) == 1 and (kind := f"{data}/{models[0]}") in DATA else data


def judged(optimizer: str, data: str) -> str:
    """First of `data`, the same data with all kinds of models, and "", on which the optimizer was tried."""
    return next(kind for kind in (*_wider(data), "") if kind == "" or any(_tasks(optimizer, kind)))


def of_models(data: str) -> str:
    """Words for one of `DATA`: "of recurrent models on text", "on text"."""
    kind, _, models = data.partition("/")
    return f"of {models} models on {kind}" if models else f"on {kind or 'all data'}"


def in_a_column(found: Known | None) -> str:
    """Points behind dense: "0.3", "-0.6…1.1", or "?" where it was not measured."""
    return "?" if found is None else "…".join(dict.fromkeys(f"{points:.1f}" for points in (found.least, found.most)))


def in_words(found: Known | None, optimizer: str, ranks: int) -> str:
    """Line of the advice about accuracy. ranks: the user's."""
    if found is None:
        return f"How this exchange learns with {optimizer} was not measured: compare the first epochs with dense ones."
    trained: dict[int, list[str]] = {size: [] for size in sorted(set(found.ranks))}
    for size, task in zip(found.ranks, found.tasks, strict=True):
        trained[size].append(task)
    models = " and ".join(f"of {', '.join(tasks)} on {size} ranks" for size, tasks in trained.items())
    nearest = f", the nearest to your {ranks}," if set(trained) != {ranks} else ""
    seeds, behind = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}", f"{in_a_column(found)} points behind dense"
    return (
        f"Time is not accuracy: with {optimizer}, small models {models}{nearest} were {behind} "
        f"(short trainings, {seeds}): compare the first epochs with dense ones."
    )


def shares(density: float, until: float = 1.0, steps: int = 1000) -> dict[float, float]:
    """{density: share of the steps that use it} under the recommended warm-up, of the first `until` of a training."""
    first = max(1, round(until * steps))
    sent = Counter(map(WarmUp.recommended(density, steps), range(first)))
    return {each: count / first for each, count in sent.items()}


def by_exchange(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by what they have in `EXCHANGE`."""
    return _grouped(rows, itemgetter(*EXCHANGE))


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _tasks(optimizer: str, kind: str) -> Iterator[str]:
    """Task of each training of a kind with that optimizer, whatever the exchange."""
    mine = (rows for (name, *_), rows in _record().items() if name == optimizer)
    return (row["task"] for row in chain.from_iterable(mine) if _within(row["data"], kind))


def _wider(data: str) -> tuple[str, ...]:
    return data, data.partition("/")[0]


def _within(data: str, kind: str) -> bool:
    return kind in ("", data) or data.startswith(f"{kind}/")


@cache
def _record() -> dict[tuple[Any, ...], list[Row]]:
    return by_exchange(json.loads(files(__package__).joinpath("accuracy.json").read_text())["rows"])
