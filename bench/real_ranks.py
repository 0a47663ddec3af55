"""Real ranks of a benchmark behind a link: what they print is shown while they run, what they find is kept.

`found_by` calls a module's function on every rank; one of them calls `tell`, and `found_by` returns what was told.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: see process_group
from slow_link import Launcher, ThrottledLink

FOUND = "BENCH_FOUND"
"""Names the file that `tell` writes to."""


def unhindered(size: int) -> ThrottledLink:
    """This machine's loopback."""
    return ThrottledLink(ranks=size, mbit_per_second=1e6, milliseconds=0)


def found_by(
    link: Launcher, part: Callable[..., None], *arguments: Any, mpi: bool, timeout: float = 1200, first: bool = False
) -> list[Any]:
    """What ranks on an entered link told, in order: each calls `part`, under mpiexec or inside `process_group`.

    arguments: of what JSON has. first: ranks come before other programs of this machine, where that is allowed, so that
    none holds one of them up while the others wait for it. Not for ranks that poll, as MPI's do.

    Raises:
        SystemExit: A rank failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found"
        path.touch()
        name = f"{part.__module__}:{part.__qualname__}"
        by = "mpi" if mpi else "gloo, first" if first else "gloo"
        words = [sys.executable, "-W", "ignore", "-m", "bench.real_ranks", by, name]
        command = ["env", f"{FOUND}={path}", *words, json.dumps(arguments)]
        limits = {"timeout": timeout, "capture": False}
        done: Sequence[subprocess.CompletedProcess[str]]
        done = [link.mpiexec(command, **limits)] if mpi else link.processes(command, **limits)  # type: ignore[arg-type]
        if any(one.returncode for one in done):
            raise SystemExit(f"{name}: ranks ended with {', '.join(str(one.returncode) for one in done)}")
        return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def process_group(init_method: str | None = None, **how: Any) -> Iterator[None]:
    """This rank's part in a gloo group, with one thread for its computing; no thread of gloo's is left at its end.

    One that frees a tensor of the last sum while Python ends would end the process by SIGABRT. Leaving a group joins
    its threads only if nobody else holds it: a DDP module must be gone by then, and `torch.distributed.nn`, which
    torch imports at need, keeps as default arguments the group that there is at that time. A rank that raises leaves
    at once, without the others.

    how: as of `torch.distributed.init_process_group`.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method, **how)
    yield
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def tell(found: Any) -> None:
    """By one rank: one of the things that `found_by` returns, of what JSON has."""
    with Path(os.environ[FOUND]).open("a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    by, name, arguments = sys.argv[1:]
    if by.endswith("first"):
        with suppress(PermissionError):  # threads that are started later have the same policy
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with nullcontext() if by == "mpi" else process_group():
        resolve_name(name)(*json.loads(arguments))
