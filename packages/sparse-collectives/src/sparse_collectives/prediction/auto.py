"""algorithm="auto": measure the ranks once, predict every algorithm, take the fastest, the same one on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from communicators import Communicator, as_communicator
from sparse_compress import SparseVector

from sparse_collectives.algorithm import State
from sparse_collectives.algorithms.table import ALGORITHMS
from sparse_collectives.prediction.calibration import agreed, measure_handling, measure_traffic
from sparse_collectives.prediction.cost import Handling, Prediction, fastest_first, predict_variants
from sparse_collectives.prediction.plain_table import amount, milliseconds, table
from sparse_collectives.wire import DENSE_WIRES, wire_named

CHOSEN = {"algorithm", "options", "wire", "state", "table"}
"""Keys of a choice that "auto" remembers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of "auto", the same on every rank. `print(choice)` shows the table.

    Attributes:
        algorithm: Name of the algorithm.
        options: Its settings.
        wire: Encoding of the values.
        predictions: Predictions for all candidates, fastest first.
        reason: One sentence.
    """

    algorithm: str
    options: Mapping[str, Any]
    wire: str
    predictions: tuple[Prediction, ...]
    reason: str

    def __str__(self) -> str:
        header = ("algorithm", "sent", "rounds", "compression", "network", "merging", "ms")
        seconds = [(p.compression, p.latency + p.transfer, p.merging, p.seconds) for p in self.predictions]
        begins = [(p.name, amount(p.nbytes), str(p.rounds)) for p in self.predictions]
        rows = [(*begin, *map(milliseconds, times)) for begin, times in zip(begins, seconds, strict=True)]
        return f"{table(header, rows)}\n{self.reason}"


def choose(
    comm: Any,
    *,
    numel: int,
    k: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    selected: bool = False,
    dense: bool = True,
    wire: str = "fp32",
    handling: Handling | None = None,
) -> Choice:
    """Measures the link, selecting and merging, and predicts one exchange of k of n elements by every algorithm.

    Collective. Every rank computes with the slowest rank's measurements, so that all come to the same choice.

    Args:
        comm: See `communicators.as_communicator`.
        numel: n.
        k: How many a rank sends.
        device: Where gradients live; default: the communicator's.
        dtype: Theirs.
        selected: The entries are selected already, so that selecting is no part of the comparison.
        dense: Whether whole gradients may be sent.
        wire: How selections travel; whole gradients as they are, or as "bf16" or "fp16" where it is that.
        handling: This rank's own costs, if they were measured already.

    Raises:
        ValueError: An unknown wire, or one that does not carry the dtype, or numel is below 1.
    """
    if numel < 1:
        raise ValueError(f"numel is {numel}, expected the number of elements of a gradient, 1 or more")
    comm = as_communicator(comm)
    wire_named(wire, dtype=dtype)
    if handling is None:
        density = min(1.0, k / numel)
        handling = measure_handling(comm, numel=numel, density=density, device=device or comm.device, wires=[wire])
    costs = agreed(handling, comm)
    costs = Handling(merge=costs.merge) if selected else costs
    link = measure_traffic(comm)
    given: dict[str, Any] = {"size": comm.size, "numel": numel, "k": min(k, numel), "link": link, "dtype": dtype}
    whole = wire if wire in DENSE_WIRES and not selected else "fp32"
    wires = {name: wire if entry.selects else whole for name, entry in ALGORITHMS.items()}
    found = fastest_first(
        [p for name in ALGORITHMS for p in predict_variants(name, handling=costs, wire=wires[name], **given)]
    )
    taken = next(p for p in found if dense or ALGORITHMS[p.algorithm].selects)
    return Choice(taken.algorithm, taken.options, taken.wire, tuple(found), _reason(taken, found))


def remembered(
    state: State | None, sparse: SparseVector, comm: Communicator, k: int, wire: str, options: Mapping[str, Any] | None
) -> tuple[str, Mapping[str, Any], State | None, str]:
    """The algorithm for such calls, its settings, own state and wire, out of "auto"'s state, where the first puts it.

    Plain values, so that it can be saved. Raises ValueError without a state: every call would measure again; and for
    options, of an algorithm that is not chosen yet, TypeError for what are no options.
    """
    wire_named(wire, dtype=sparse.dtype)
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options is {options!r}, expected a dict of the algorithm's own settings")
    if options:
        raise ValueError(f'algorithm="auto" chooses options too, but {dict(options)} was given: name their algorithm')
    if state is None:
        raise ValueError('algorithm="auto" measures once and remembers: give a state, {} at first, to all such calls')
    known = [choice for choice in state.values() if isinstance(choice, dict) and set(choice) == CHOSEN]
    if len(known) < len(state) or not all(isinstance(choice["algorithm"], str) for choice in known):
        keys = sorted(map(str, state))
        raise ValueError(f'this is the state of another algorithm than "auto", with the keys {keys}: give {{}}')
    key = f"numel={sparse.numel}, {sparse.dtype}, k={k}, wire={wire}, {comm.size} ranks"
    if key not in state:
        choice = choose(
            comm, numel=sparse.numel, k=k, device=sparse.device, dtype=sparse.dtype, selected=True, wire=wire
        )
        state[key] = {
            "algorithm": choice.algorithm,
            "options": dict(choice.options),
            "wire": choice.wire,
            "state": ALGORITHMS[choice.algorithm].initial_state(),
            "table": str(choice),
        }
    known = state[key]
    return known["algorithm"], known["options"], known["state"], known["wire"]


def _reason(taken: Prediction, found: list[Prediction]) -> str:
    others = [p for p in found if p is not taken]
    if not taken.seconds and not others[0].seconds:
        return f"{taken.name}: one rank exchanges nothing."
    if others[0].seconds < taken.seconds:
        return (
            f"{others[0].name} is faster ({milliseconds(others[0].seconds)} ms) than {taken.name} "
            f"({milliseconds(taken.seconds)} ms), which is taken because momentum before the selection, or "
            f"an UpdateOptimizer, needs one: leave compression off, and give momentum to the optimizer."
        )
    if not ALGORITHMS[taken.algorithm].selects:
        return f"{taken.name} is the fastest: compression costs more than it saves here, leave it off."
    return f"{taken.name} is the fastest, {others[0].name} comes next."
