"""Tells what of thinwire is installed and whether it works; under torchrun or mpiexec, whether ranks reach each other.

Each line is ok, a note (something is slower or absent) or a FAULT; after the colon stands what to do. The exit status
is 1 where there is a fault.

Examples:
  thinwire doctor
  torchrun --nproc-per-node 2 -m thinwire doctor
  mpiexec -n 8 python -m thinwire doctor --timeout 60
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.advice.command import quantity
from thinwire.doctor.facts import Launched, launched, versions
from thinwire.doctor.installation import about_kernels, about_mpi, about_packages, about_slow_link, about_torch
from thinwire.doctor.probe import FAULT, Finding, Probe, probe
from thinwire.doctor.ranks import about_one_rank, about_ranks, outcome

PATIENCE = 0.8
"""Share of the time limit for which ranks wait for each other, so that each can still say whom it has missed."""
LAST_WORD_SECONDS = 10.0
"""Longest time for which a rank that has failed leaves rank 0 to speak."""
SECONDS = quantity("seconds from 1 to 3600", 1, 3600)
DRIVER = Path("/proc/driver/nvidia/version")
LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "HYD", "MPI_LOCAL", "SLURM_", "PALS_")
"""Prefixes of variables by which MPI finds other ranks; without them it starts as one rank."""
CUDA = """import torch
for device in range(torch.cuda.device_count()):
    assert torch.ones(9, device=torch.device("cuda", device)).sum().item() == 9
    print(torch.cuda.get_device_name(device))"""
MPI = """import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__, MPI.Get_library_version().splitlines()[0], sep="\\n", flush=True)
level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
names = ("THREAD_MULTIPLE", "THREAD_SERIALIZED", "THREAD_FUNNELED", "THREAD_SINGLE")
print(next(name for name in names if getattr(MPI, name) == level), flush=True)
MPI.Finalize()"""
SLOW_LINK = """import slow_link
slow_link.enter_user_namespaces()
print(*slow_link.missing(), sep="; ")"""


def examined(here: Launched | None, environ: Mapping[str, str], seconds: float) -> Iterator[Finding]:
    """Findings, each as soon as it is known. The link is measured while nothing else runs here."""
    yield from about_packages(versions())
    if here:
        yield from about_ranks(here, meet(environ, seconds), environ)
    yield from installed(environ, seconds)
    if not here:
        yield about_one_rank(environ)


def installed(environ: Mapping[str, str], seconds: float) -> Iterator[Finding]:
    """Findings on this machine; all probes run at once."""
    alone = {name: value for name, value in environ.items() if not name.startswith(LAUNCHERS)}
    launcher = shutil.which("mpiexec", path=environ.get("PATH"))
    with ThreadPoolExecutor() as pool:

        def start(*command: str) -> Future[Probe]:
            return pool.submit(probe, command, alone, seconds)

        cuda = start(sys.executable, "-c", CUDA) if torch.version.cuda or torch.version.hip else None
        kernels, mpi = start(sys.executable, "-m", "sparse_compress"), start(sys.executable, "-c", MPI)
        mpiexec = start(launcher, "--version") if launcher else None
        slow_link = start(sys.executable, "-c", SLOW_LINK)
        there = {"driver": DRIVER.exists(), "triton": find_spec("triton") is not None}
        yield about_torch(str(torch.__version__), backends(), cuda.result() if cuda else None, **there)
        yield about_kernels(kernels.result())
        yield from about_mpi(mpi.result(), mpiexec.result() if mpiexec else None)
        yield about_slow_link(slow_link.result())


def meet(environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Meets the other ranks in a process of its own; returns its `outcome`."""
    end = time.monotonic() + PATIENCE * seconds
    return outcome(probe([sys.executable, "-m", "thinwire.doctor.meeting", str(end)], environ, seconds))


def backends() -> list[str]:
    """Backends of torch.distributed that this build has, of those that matter here."""
    if not dist.is_available():
        return []
    return [name for name, there in (("gloo", dist.is_gloo_available()), ("NCCL", dist.is_nccl_available())) if there]


def elsewhere(here: Launched, environ: Mapping[str, str], seconds: float) -> int:
    """Meets the others on a rank that is not the first; returns its exit status.

    It speaks only where rank 0 cannot know. Then it ends late: a launcher that sees a rank fail ends rank 0 as well.
    """
    end = time.monotonic() + seconds
    met = meet(environ, seconds)
    if "ranks" in met:
        return 0
    print(f"rank {here.rank}: {about_ranks(here, met, environ)[0]}", file=sys.stderr, flush=True)
    time.sleep(min(LAST_WORD_SECONDS, max(0.0, end - time.monotonic())))
    return 1


def main(argv: Sequence[str]) -> int:
    """Prints the findings on rank 0; returns the exit status, 1 where one is a fault, 2 where flags make no sense."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="thinwire doctor", description=__doc__, formatter_class=shape)
    parser.add_argument("--json", action="store_true", help="a JSON list of {level, what, remedy} instead of text")
    parser.add_argument("--timeout", type=SECONDS, default=30.0, metavar="T", help="of each probe, in s; default 30")
    flags = parser.parse_args(argv)
    here = launched(os.environ)
    if here and here.rank:
        return elsewhere(here, os.environ, flags.timeout)
    findings = []
    for finding in examined(here, os.environ, flags.timeout):
        findings.append(finding)
        if not flags.json:
            print(finding, flush=True)
    if flags.json:
        print(json.dumps([finding._asdict() for finding in findings], ensure_ascii=False, indent=2))
    return int(any(finding.level == FAULT for finding in findings))
