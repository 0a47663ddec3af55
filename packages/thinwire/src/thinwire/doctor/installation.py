"""Findings on one machine, each from what was found there: packages, torch, compiled kernels, MPI, emulated links."""

import re
from collections.abc import Mapping, Sequence

from thinwire.doctor.facts import library_name
from thinwire.doctor.probe import Finding, Probe, fault, note, ok

OLDEST_TORCH = (2, 6)
FAMILIES = {
    "Open MPI": ("open mpi", "openrte", "prrte"),
    "MPICH": ("mpich", "hydra", "mvapich", "intel(r) mpi", "parastation"),
}


def about_packages(found: Mapping[str, str]) -> list[Finding]:
    """Findings on thinwire's distributions. found: version of each, "" where it is not installed."""
    names: dict[str, list[str]] = {}
    for name, version in found.items():
        names.setdefault(version, []).append(name)
    absent = ", ".join(names.pop("", []))
    findings = [ok(f"{', '.join(each)} {version}") for version, each in names.items()]
    remedy = "where their sources are on the path, as in a checkout, they work; else pip install them"
    return findings + ([note(f"not installed: {absent}", remedy)] if absent else [])


def about_torch(version: str, backends: Sequence[str], cuda: Probe | None, *, driver: bool, triton: bool) -> Finding:
    """Finding on torch. backends: of torch.distributed. cuda: None in a build without. driver: of a GPU."""
    devices = cuda.out.splitlines() if cuda else []
    what = ", ".join([f"torch {version}", *backends, *(devices or ["no CUDA device"])])
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        return fault(f"{what}, is too old", "pip install 'torch>=2.6'")
    if "gloo" not in backends:
        return fault(f"{what}, has no gloo, by which ranks meet", "install a build of torch with it, as on PyPI")
    if cuda and cuda.status != 0:
        remedy = "see in nvidia-smi whether the GPU is free and its driver as new as torch.version.cuda"
        return fault(f"{what}, CUDA fails ({cuda.why})", remedy)
    if driver and not devices:
        remedy = "install a build of torch with CUDA (pytorch.org/get-started), or unset CUDA_VISIBLE_DEVICES"
        return note(f"{what}, though there is a GPU's driver", remedy)
    if devices and not triton:
        return note(f"{what}, no Triton, so selection on a GPU is slower", "pip install triton")
    return ok(what)


def about_kernels(tried: Probe) -> Finding:
    """Finding on compiled kernels. tried: outcome of `python -m sparse_compress`."""
    words = tried.out.strip().partition(": on a CPU ")[2]
    if tried.status != 0 or not words:
        remedy = "set SPARSE_COMPRESS_NATIVE=0; if that helps, install sparse-compress again on this very machine"
        remedy = f"give a busy machine longer by --timeout; if it hangs, {remedy}" if tried.status is None else remedy
        return fault(f"sparse-compress fails ({tried.why})", remedy)
    if words.startswith("kernels for "):
        return ok(f"sparse-compress has its compiled {words.partition(':')[0]}")
    again = "sparse-compress again: pip install --force-reinstall --no-deps ./packages/sparse-compress in a checkout"
    remedy = f"install {again}" if "cannot be loaded" in words else f"install a C compiler, then {again}"
    if "SPARSE_COMPRESS_NATIVE" in words:
        remedy = "unset SPARSE_COMPRESS_NATIVE"
    return note(f"sparse-compress has no compiled kernels, so it is slower ({words})", remedy)


def about_mpi(tried: Probe, mpiexec: Probe | None) -> list[Finding]:
    """Findings on mpi4py and its launcher. tried: outcome of MPI. mpiexec: of its --version; None without one."""
    if "No module named 'mpi4py'" in tried.err:
        return [note("no mpi4py", "pip install mpi4py mpich, if ranks are to exchange by MPI")]
    version, library, threads = [*tried.out.splitlines(), "", "", ""][:3]
    library = library_name(library)
    what = ", ".join(filter(None, [f"mpi4py {version}".strip(), library, threads]))
    if tried.status != 0:
        remedy = "pip install mpich, or load your cluster's MPI; on a cluster try it on a compute node"
        return [fault(f"{what}, cannot start MPI ({tried.why})", remedy)]
    findings = [ok(what)]
    if threads != "THREAD_MULTIPLE":
        findings = [note(what, "take an MPI with THREAD_MULTIPLE; this one makes progress inside calls only")]
    if mpiexec is None:
        return [*findings, note("no mpiexec on the PATH", "start ranks by srun or torchrun, or load your MPI")]
    its, ours = family(mpiexec.out + mpiexec.err), family(library)
    if its and ours and its != ours:
        what = f"mpiexec is {its}'s, mpi4py loads {library}: every process would be rank 0 of 1"
        remedy = f"put {ours}'s mpiexec first on the PATH, or install mpi4py for {its}"
        return [*findings, fault(what, remedy)]
    if not its:
        remedy = "try whether they fit: mpiexec -n 2 python -m thinwire doctor"
        return [*findings, note(f"mpiexec does not tell of which MPI it is, mpi4py loads {library}", remedy)]
    return [*findings, ok(f"mpiexec is {its}'s")]


def family(said: str) -> str:
    """MPICH or Open MPI: whose relatives start each other's programs; "" for another one."""
    lowered = said.lower()
    return next((name for name, words in FAMILIES.items() if any(word in lowered for word in words)), "")


def about_slow_link(tried: Probe) -> Finding:
    """Finding on emulated slow links. tried: outcome of SLOW_LINK."""
    if tried.status == 0 and not tried.out.strip():
        return ok("slow links can be emulated")
    lacking = tried.out.strip() if tried.status == 0 else tried.why
    remedy = "install or allow that, if you want `thinwire slow-link`; nothing else needs it"
    return note(f"no slow link can be emulated ({lacking})", remedy)
