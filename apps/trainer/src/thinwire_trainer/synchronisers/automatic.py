"""--algorithm auto: what is predicted to be fastest on these ranks, chosen once, before there is an optimizer.

Momentum's place depends on the choice (see `synchronisers.synchronous`), so it cannot wait for the optimizer.
From then on the run is one of the algorithm that was chosen: its settings, metrics and checkpoints are that one's, and
config.json says besides that it was chosen, and why. A run that is gone on with keeps its choice: nothing is measured.
"""

import json
from argparse import ArgumentTypeError
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from communicators import Communicator
from sparse_collectives import Choice, choose
from sparse_compress import TopK
from torch import nn

from thinwire_trainer.agreement import all_or_none, gather_texts
from thinwire_trainer.command_line.flag import Flag
from thinwire_trainer.command_line.flags import optimizer_defaults
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import DamagedError, RunError
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.synchronisers.table import AUTO, Synchronisation

CHOSEN_WITH = {"teams", "wire"}
"""Own flags of an algorithm that are chosen with it."""


def settled(
    options: Options, model: nn.Module, comm: Communicator, table: Mapping[str, Synchronisation]
) -> tuple[Options, str]:
    """The options with an algorithm by name in the place of "auto", and what config.json keeps of why.

    Collective: all ranks come to the same. AgreedError where there is no run to resume, or one whose algorithm was not
    chosen.
    """
    if options.resume is None:
        choice = _measured(options, model, comm)
        found: dict[str, Any] = {"algorithm": choice.algorithm, "wire": choice.wire, **choice.options}
        said = why(choice)
    else:
        found = _recorded(options, comm)
        said = found["choice"]
    with all_or_none(comm):
        return _named(options, found, table, comm.size), said


def why(choice: Choice) -> str:
    """One line: auto: gtopk, predicted 28 ms an exchange; dense 40 ms."""
    taken, *others = choice.predictions
    other = next((p for p in others if p.algorithm == "dense"), others[0])
    return f"{AUTO}: {taken.name}, predicted {_shown(taken.seconds)} an exchange; {other.name} {_shown(other.seconds)}"


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _measured(options: Options, model: nn.Module, comm: Communicator) -> Choice:
    """Measure the exchange of the model's whole gradient, and choose."""
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    k = TopK(options.own["density"]).entries(numel)
    return choose(comm, numel=numel, k=k, device=trained[0].device, wire=options.own["wire"])


def _recorded(options: Options, comm: Communicator) -> dict[str, Any]:
    """Rank 0's reading of the run's config.json, as another machine may not see it yet."""
    folder, text = RunFolder(options.output), ""
    with all_or_none(comm):
        if comm.rank == 0:
            config = folder.recorded()
            if not isinstance(config.get("choice"), str):
                raise RunError(
                    f"--algorithm {AUTO}, but the run in {folder.path} was not made with it: "
                    f"give --algorithm {config.get('algorithm')!s:.40}"
                )
            text = json.dumps(config)
    recorded: dict[str, Any] = json.loads(gather_texts(text, comm)[0])
    return recorded


def _named(options: Options, found: Mapping[str, Any], table: Mapping[str, Synchronisation], workers: int) -> Options:
    """Options as if the user had named the algorithm; its own flags: those chosen with it, then the user's."""
    entry = table.get(str(found["algorithm"]))
    if entry is None:
        raise RunError(
            f"the run's config.json says {found['algorithm']!s:.40}, which is no --algorithm of this program"
        )
    own: dict[str, Any] = {flag.name: options.own.get(flag.name, flag.default) for flag in entry.flags}
    own |= {flag.name: _read(flag, found[flag.name]) for flag in entry.flags if flag.name in CHOSEN_WITH & found.keys()}
    entry.check(own, workers)
    usual = {} if options.momentum_said else {**optimizer_defaults(entry, options.optimizer), **found}
    momentum = usual.get("momentum", options.momentum)
    others = [flag for flag in options.declared if flag.name not in options.own]
    flags = (*others, *entry.flags)
    return replace(options, algorithm=str(found["algorithm"]), momentum=momentum, own=own, declared=flags)


def _read(flag: Flag, value: object) -> Any:
    """Value of a flag in config.json."""
    with suppress(ArgumentTypeError):
        read = flag.read(str(value))
        if flag.choices is None or read in flag.choices:
            return read
    raise DamagedError(f"the run's config.json is damaged: {flag.name} is {value!s:.40}")
