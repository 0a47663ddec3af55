"""Findings on the ranks of a launch, each from its variables and from what they told each other."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from communicators import Link

from thinwire.advice.report import speed
from thinwire.doctor.facts import LOOPBACK, VARIABLES, Facts, Launched
from thinwire.doctor.probe import FAULT, Finding, Probe, fault, note, ok

LATE = "its time was over before it had started"
OTHER_MPI = "start them by that MPI's own mpiexec, or with srun by the --mpi= that it speaks"


def outcome(met: Probe) -> dict[str, Any]:
    """How far a rank came with the others: all that its process said, and an "error" if it failed."""
    found: dict[str, Any] = {} if met.status == 0 else {"error": met.why}
    for line in met.out.splitlines():
        with suppress(ValueError, TypeError):  # MPI libraries print lines of their own
            found |= json.loads(line)
    return found


def about_ranks(here: Launched, met: Mapping[str, Any], environ: Mapping[str, str]) -> list[Finding]:
    """Findings on the ranks of a launch. met: the `outcome` of this one."""
    ranks, error = met.get("ranks", []), met.get("error", "")
    if not ranks:
        return [apart(here, error, environ)]
    started = f"{here.size} ranks were started ({here.variable})"
    if len(ranks) != here.size:
        return [fault(f"{started}, but mpi4py, with {met['library']}, finds {len(ranks)}", OTHER_MPI)]
    places = list(where(ranks, by_torch=here.by_torch))
    findings = [*places, *unlike(ranks)]
    if "pairs" not in met and any(place.level == FAULT for place in places):
        return findings  # it is the reason
    if "pairs" not in met and "two jobs have met" in error:
        return [*findings, fault(f"ranks of two jobs have met ({error})", "give each a MASTER_PORT of its own")]
    if "pairs" not in met:
        interface = (
            "GLOO_SOCKET_IFNAME" if here.by_torch else "FI_TCP_IFACE (MPICH), OMPI_MCA_btl_tcp_if_include (Open MPI)"
        )
        remedy = f"open all ports between the hosts, and name the interface that joins them: {interface}"
        return [*findings, fault(f"ranks met, but cannot all exchange ({error})", remedy)]
    findings.append(ok("every pair of ranks exchanges"))
    if "beta" in met:
        findings.append(ok(f"link of the slowest pair: {speed(Link(met['alpha'], met['beta']))}"))
    if error:
        remedy = "give a slow network more time by --timeout; look into the docs, Debugging a hang, if a rank has died"
        findings.append(fault(f"ranks exchange, but do not come to an end ({error})", remedy))
    return findings


def about_one_rank(environ: Mapping[str, str]) -> Finding:
    """Finding on a process that is no rank of several, by its launcher's variables or because one is no number."""
    given = ((name, environ.get(name, "")) for pair in VARIABLES for name in pair)
    for name, value in given:
        if value and not value.isdigit():
            return fault(f"{name} is {value!r}, expected a number", "start ranks by torchrun, or set it")
    return note("one rank, so no network was tried", "torchrun --nproc-per-node 2 -m thinwire doctor")


def apart(here: Launched, error: str, environ: Mapping[str, str]) -> Finding:
    """Finding on ranks that did not meet, and the likely reasons."""
    place = f"{environ.get('MASTER_ADDR', '?')}:{environ.get('MASTER_PORT', '?')}"
    started = f"{here.size} ranks were started ({here.variable})"
    what = f"{started}, and rank {here.rank} does not meet them ({error})"
    if "No module named 'mpi4py'" in error:
        return fault(what, "pip install mpi4py, or start them by torchrun")
    if "PMI version" in error or "PMIx" in error:
        return fault(f"{started} by a launcher of another MPI than mpi4py's ({error})", OTHER_MPI)
    if here.by_torch and (wrong := misset(here, environ)):
        return fault(f"rank {here.rank} of {here.size} meets none: {wrong}", "start ranks by torchrun, or set it")
    if not here.by_torch:
        remedy = "an mpiexec of another MPI, a firewall between hosts, or another network interface than they share"
        return fault(what, f"likely {remedy}")
    if LATE in error:
        return fault(what, "give it longer by --timeout")
    if "address already in use" in error.lower():
        return fault(f"MASTER_PORT at {place} is taken by another program", "take another MASTER_PORT")
    if "Ping failed" in error:
        return fault(f"at {place} answers what is not torch's rank 0", "take another MASTER_PORT, no proxy")
    remedy = f"{place} (MASTER_ADDR, MASTER_PORT) cannot be reached from this host or is another program's, a firewall"
    return fault(what, f"likely {remedy}, a wrong interface, or ranks that were not started, or later than --timeout")


def misset(here: Launched, environ: Mapping[str, str]) -> str:
    """The first of torch's variables by which ranks cannot meet, with the value expected; "" if there is none."""
    port = environ.get("MASTER_PORT", "")
    if not environ.get("MASTER_ADDR"):
        return "MASTER_ADDR is not set, expected the host of rank 0"
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        return f"MASTER_PORT is {port!r}, expected one port of 1 to 65535 on all ranks"
    return f"RANK is {here.rank}, expected 0 to {here.size - 1}" if here.rank >= here.size else ""


def where(ranks: Sequence[Facts], *, by_torch: bool) -> Iterator[Finding]:
    """Findings on each host, and on addresses that other hosts cannot reach. by_torch: gloo carries what is sent."""
    places: dict[tuple[str, str, str | None], list[int]] = {}
    for rank, its in enumerate(ranks):
        places.setdefault((its["host"], its["interface"], its["address"]), []).append(rank)
    hosts = {host for host, _, _ in places}
    for (host, interface, address), there in places.items():
        what = f"{numbers(there)} on {host}"
        if address is None and by_torch:
            remedy = "name another one in GLOO_SOCKET_IFNAME (`ip addr` lists them)"
            yield fault(f"{what} has no interface {interface}", remedy)
        elif by_torch and len(hosts) > 1 and (address or "").startswith(LOOPBACK):
            remedy = "set GLOO_SOCKET_IFNAME to the interface that joins the hosts (`ip addr` lists them)"
            yield fault(f"{what}: its name stands for {address}, which other hosts cannot reach", remedy)
        else:
            takes = "gloo takes" if by_torch else "gloo would take"
            yield ok(f"{what}, {takes} {interface} {address or '(without an address)'}")


def unlike(ranks: Sequence[Facts]) -> list[Finding]:
    """Findings on versions that are not the same on all ranks."""
    findings = []
    for name in ranks[0]["versions"]:
        having: dict[str, list[int]] = {}
        for rank, its in enumerate(ranks):
            having.setdefault(its["versions"].get(name) or "none", []).append(rank)
        if len(having) > 1:
            told = ", ".join(f"{version} on {numbers(there)}" for version, there in having.items())
            findings.append(fault(f"ranks have unlike versions of {name}, {told}", "install the same everywhere"))
    return findings or [ok(f"all {len(ranks)} ranks have the same torch and packages")]


def numbers(ranks: Sequence[int]) -> str:
    """Ranks in increasing order, as text: "rank 4" or "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, run)) for run in runs)}"
