"""Laws, features of DDP, and failures that all ranks tell alike, on real ranks; the cases stand in modules.

One launch runs what is asked for of its worlds, since a rank takes seconds to start: see on_ranks.py. On GPUs, marked
`gpu`, over gloo and NCCL; without one on a device that is only pretended.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from devices import needs_pretend
from old_torch import since_2_7

SCRIPT = Path(__file__).parent / "on_ranks.py"
MPI = (
    *(f"mpi-{size}:{module}" for size in (1, 2) for module in ("dense_cases", "sparse_cases")),
    *(f"mpi-3:{module}" for module in ("dense_cases", "sparse_cases", "local_cases")),
    *(f"mpi-4:{module}" for module in ("dense_cases", "sparse_cases", "partial_cases")),
)
TWO = ("gloo:dense_cases", "gloo:sparse_cases", "gloo:ddp_accumulation", "gloo:digits_cases", "gloo:advised_cases")
"""Means of two are exact."""
THREE = (
    "no-group:late_groups",
    *(f"gloo:{module}" for module in ("dense_cases", "sparse_cases", "local_cases", "partial_cases")),
    *(f"gloo:{module}" for module in ("ddp_cases", "ddp_learning", "ddp_states", "uneven_cases")),
    "untagged:untagged_cases",
)
FOUR = ("gloo:hsdp_cases", "gloo:twice_cases")  # two nodes of two
SELDOM = {
    *(f"mpi-{size}:{module}" for size in (1, 2) for module in ("dense_cases", "sparse_cases")),
    *("mpi-3:sparse_cases", "mpi-3:local_cases", "mpi-4:dense_cases", "mpi-4:FAILURES", "untagged-3:LAWS"),
    *("gloo-2:dense_cases", "gloo-2:sparse_cases", "gloo-3:partial_cases.LAWS", "gloo-3:ddp_learning"),
}
"""What others take too, or what takes long: only with --whole, as the cases that a module names SELDOM."""
SINCE_2_7 = {
    "hsdp_cases": since_2_7("lacks FSDPModule.set_all_reduce_hook"),
    "late_groups": since_2_7("may wait for the GIL for ever where a group of gloo is freed"),
}
PRETEND = ("pretend-gloo:device_cases", "pretend-untagged:device_cases")
GPUS = torch.cuda.device_count()


@dataclass(frozen=True)
class Launch:
    size: int
    items: tuple[str, ...]
    gpus: int = 0


LAUNCHES = {
    "gloo-2": Launch(2, TWO),
    "gloo-3": Launch(3, THREE),
    "gloo-4": Launch(4, FOUR),
    "pretend-3": Launch(3, PRETEND),
    "mpi": Launch(4, MPI),
    "gpu": Launch(2, ("cuda-gloo:device_cases", "cuda-gloo:device_ddp_cases"), gpus=1),
    "gpus": Launch(min(max(GPUS, 2), 3), ("cuda-nccl:device_cases", "cuda-nccl:device_ddp_cases"), gpus=2),
}


def ranks_of(launch, item):
    """How many take part."""
    world = item.partition(":")[0]
    return int(world.removeprefix("mpi-")) if world.startswith("mpi-") else launch.size


def marks(name, module, case, seldom):
    seldom = seldom or case in getattr(import_module(module), "SELDOM", ())
    return [
        *([pytest.mark.few(0)] if seldom else []),
        *([SINCE_2_7[module]] if module in SINCE_2_7 else []),
        *needs(name),
    ]


def needs(name):
    launch = LAUNCHES[name]
    if launch.gpus:
        return [pytest.mark.gpu, pytest.mark.skipif(launch.gpus > GPUS, reason=f"{GPUS} GPUs, needs {launch.gpus}")]
    return [pytest.mark.mpi] if name.startswith("mpi") else [needs_pretend] if name.startswith("pretend") else []


def cases(kind):
    """Of every launch, item by item."""
    for name, launch in LAUNCHES.items():
        for item in launch.items:
            world, _, module = item.partition(":")
            ranks = ranks_of(launch, item)
            for case in getattr(import_module(module), kind, ()) if kind == "LAWS" or ranks > 1 else ():
                at = f"{world.removesuffix(f'-{ranks}')}-{ranks}"
                marked = marks(name, module, case, {f"{at}:{module}", f"{at}:{kind}", f"{at}:{module}.{kind}"} & SELDOM)
                yield pytest.param(name, item, case, id=f"{at}-{module}-{case.__name__}", marks=marked)


@pytest.fixture(scope="module")
def outcomes(mpiexec, processes, tmp_path_factory, request):
    """outcomes(launch) -> {item: {case: [outcome of each rank]}}; those over gloo are launched side by side."""
    folder, begun = tmp_path_factory.mktemp("ranks"), {}
    asked = defaultdict(partial(defaultdict, list))
    for test in request.session.items:
        skipped = any(mark.args[0] for mark in test.iter_markers("skipif"))
        if test.fspath == request.fspath and not skipped:
            params = test.callspec.params
            asked[params["launch"]][params["item"]].append(params["case"].__name__)

    def launch(name):
        size, given = LAUNCHES[name].size, asked[name]
        items = [f"{item}={','.join(given[item])}" for item in LAUNCHES[name].items if item in given]
        report, by_mpi = folder / f"{name}.json", partial(mpiexec, interpreters=True)
        done = (by_mpi if name.startswith("mpi") else processes)(size, SCRIPT, report, *items, timeout=280)
        for rank in done if isinstance(done, list) else [done]:
            assert rank.returncode == 0, rank.stderr
        return json.loads(report.read_text())

    with ThreadPoolExecutor(2) as side_by_side:

        def of(name):
            for other in ("gloo-2", "gloo-3", "gloo-4") if name.startswith("gloo") else (name,):
                if other not in begun and asked[other]:
                    begun[other] = side_by_side.submit(launch, other)
            return begun[name].result()

        yield of


@pytest.mark.parametrize(("launch", "item", "case"), list(cases("LAWS")))
def test_laws(outcomes, launch, item, case):
    found = outcomes(launch)[item][case.__name__]
    errors = [outcome.get("error") or outcome.get("reason") for outcome in found]
    assert errors == [None] * ranks_of(LAUNCHES[launch], item), next(filter(None, errors))


@pytest.mark.parametrize(("launch", "item", "case"), list(cases("FAILURES")))
def test_the_same_reason_on_all_ranks_within_seconds(outcomes, launch, item, case):
    found = outcomes(launch)[item][case.__name__]
    reasons = {outcome.get("reason", str(outcome)) for outcome in found}
    assert len(reasons) == 1, reasons
    said = import_module(item.partition(":")[2]).FAILURES[case]
    expected = tuple(one.format(last=len(found) - 1) for one in ([said] if isinstance(said, str) else said))
    # Which of the ranks that agree is named goes by who comes first.
    named = re.sub(rf"^(ranks disagree on call \d+: )rank [0-{len(found) - 2}] calls", r"\1rank 0 calls", reasons.pop())
    assert named.startswith(expected), named
    assert max(outcome["seconds"] for outcome in found) < 30
