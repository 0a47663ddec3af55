"""Bits of every algorithm in every adapter, beside those of an earlier commit: a redesign must not change them.

    python -m bench bits [--write] [--real]

A case is an algorithm, its adapter, wire and number of ranks; it takes 12 steps. Recorded of each: a hash of all ranks'
parameters (of a call: its results), of residuals and velocities by parameter, of all else that is saved, and the bytes
that the ranks sent. Without --write prints each case that differs from bench/bits.json, and in which of them.
--real: over gloo and MPI as well, for the DDP hook and HSDP, and a few of the others.
"""

import argparse
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from communicators import Communicator, SimulatedWorld, as_communicator
from data_parallel import DistributedOptimizer, SparseHookState, UpdateOptimizer, sparse_hook, sparse_hsdp
from local_sgd import ALGORITHMS as PERIODIC
from partial_collectives import EagerSGD
from sparse_collectives import ALGORITHMS, WIRES, sparse_allreduce
from sparse_compress import SparseVector, topk
from torch import Tensor, nn

from bench.real_ranks import found_by, tell, unhindered
from bench.record import ROOT

STEPS = 12
SIZES = (1, 2, 3, 5, 8)
HERE = ROOT / "bench" / "bits.json"
SPARSE = [name for name in ALGORITHMS if name != "dense"]
OPTIONS: dict[str, list[dict[str, Any]]] = {"spardl": [{}, {"teams": 2}], "oktopk": [{}, {"boundaries_every": 2}]}
COLUMNS = ("parameters", "residuals", "state", "bytes")
BY_PARAMETER = ("residuals", "velocities")
REAL_SIZES = {"gloo": (2, 4), "mpi": (2,)}
Case = Callable[[Communicator], tuple[Any, Any, Any]]
"""On one rank: what it computed, what waits there by parameter, and what else it would save."""


def main(argv: Sequence[str] = ()) -> int:
    """Hashes all cases; returns 1 where one differs from the file."""
    parser = argparse.ArgumentParser(prog="python -m bench bits", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="make the file anew instead of comparing with it")
    parser.add_argument("--real", action="store_true", help="real ranks too, two minutes more")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # sums of several threads have other bits
    found = dict(_simulated(options.only)) | (_real(options.only) if options.real else {})
    if options.write:
        HERE.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{len(found)} cases written to {HERE}")
        return 0
    return _compare(found, json.loads(HERE.read_text()))


def _compare(found: dict[str, list[Any]], before: dict[str, list[Any]]) -> int:
    others = 0
    for name, now in found.items():
        if now != (then := before.get(name)):
            others += 1
            unlike = [c for c, a, b in zip(COLUMNS, now, then or [None] * 4, strict=True) if a != b]
            print(f"{name}: {'not in the file' if then is None else 'other ' + ', '.join(unlike)}")
    print(f"{len(found)} cases, {others} of them differ from {HERE.name}")
    return 1 if others else 0


def _simulated(only: str) -> Iterator[tuple[str, list[Any]]]:
    for size in SIZES:
        for name, case in cases(size):
            if only in (name := f"{name}, simulated {size}"):
                world = SimulatedWorld(size)
                yield name, [*hashed(world.run(_quietly(case))), world.bytes_sent]


def cases(size: int) -> Iterator[tuple[str, Case]]:
    """All that run in any world, by name."""
    for algorithm, options, wire in _ways(size):
        said = f"{algorithm}{options or ''} {wire}"
        ways: dict[str, Any] = {"algorithm": algorithm, "options": options, "wire": wire}
        yield f"call {said}", partial(_call, **ways)
        if wire in ("fp32", "bf16-packed"):
            yield f"gradients {said}", partial(_optimizer, DistributedOptimizer, momentum=0.9, **ways)
            yield f"updates {said}", partial(_optimizer, UpdateOptimizer, inner="adamw", **ways)
        if wire == "fp32":
            yield f"overlap {said}", partial(_optimizer, DistributedOptimizer, overlap=True, bucket_bytes=400, **ways)
            yield (
                f"skip {said}",
                partial(_optimizer, DistributedOptimizer, nonfinite="skip", dense_below=8, clip_norm=1.0, **ways),
            )
    for algorithm in ("dense", "powersgd", "dense-int8"):
        ways = {"algorithm": algorithm, "density": None}
        yield f"gradients {algorithm}", partial(_optimizer, DistributedOptimizer, **ways)
    yield (
        "gradients dense bf16",
        partial(_optimizer, DistributedOptimizer, algorithm="dense", wire="bf16", density=None),
    )
    for algorithm, inner in itertools.product(PERIODIC, ("sgd", "adamw")):
        yield f"periodic {algorithm} {inner}", partial(_periodic, algorithm=algorithm, inner=inner)
    for algorithm, compress in itertools.product(("local-sgd", "diloco"), ("int8", "int4", "int2")):
        yield f"periodic {algorithm} compress={compress}", partial(_periodic, algorithm=algorithm, compress=compress)
    for quorum in ("solo", "majority", size):
        yield f"eager {'all' if quorum == size else quorum}", partial(_eager, quorum=quorum)


def _ways(size: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    for algorithm in SPARSE:
        for options in OPTIONS.get(algorithm, [{}]):
            if size % options.get("teams", 1) == 0:
                yield from ((algorithm, options, wire) for wire in WIRES)


def _call(comm: Communicator, *, algorithm: str, options: dict[str, Any], wire: str) -> tuple[Any, Any, Any]:
    entry, k, residual = ALGORITHMS[algorithm], 11, torch.zeros(203)
    state = entry.initial_state()
    found: list[Tensor] = []
    for step in range(STEPS):
        chosen = topk(residual + _noise(step, comm.rank, 203), k)
        residual = residual + _noise(step, comm.rank, 203) - chosen.to_dense()
        ways: dict[str, Any] = {"algorithm": algorithm, "options": options, "wire": wire, "state": state}
        reduction = sparse_allreduce(chosen, comm, k=k, **ways)
        residual += reduction.dropped.to_dense()
        found += [reduction.total.indices, reduction.total.values]
    return found, residual, state


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def _inner(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.5, 0.999))
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if name == "momentum" else 0.0)


def _noise(step: int, rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def _backward(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, comm: Communicator, step: int
) -> None:
    optimizer.zero_grad()
    loss: Tensor = model(_noise(step, comm.rank, 4, 9)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


def _train(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
    for step in range(STEPS):
        _backward(model, optimizer, comm, step)
        optimizer.step()


def _optimizer(
    kind: Callable[..., Any], comm: Communicator, *, inner: str = "sgd", density: float | None = 0.05, **ways: Any
) -> Any:
    model = _model()
    optimizer = kind(_inner(inner, model), model.named_parameters(), comm=comm, density=density, **ways)
    _train(model, optimizer, comm)
    return _parts(model, optimizer.state_dict())


def _periodic(comm: Communicator, *, algorithm: str, inner: str = "momentum", **ways: Any) -> Any:
    model = _model()
    made: Any = PERIODIC[algorithm]
    base = _inner(inner, model)
    if algorithm == "demo":  # it has a weight decay of its own
        base.param_groups[0]["weight_decay"] = 0.0
    optimizer = made(base, comm=comm, model=model, sync_every=4, **ways)
    for step in range(STEPS - 1):
        _backward(model, optimizer, comm, step)
        optimizer.step()
        optimizer.average()
    state = optimizer.state_dict()
    optimizer.finish()
    return _parts(model, state)


def _eager(comm: Communicator, *, quorum: Any) -> Any:
    model = _model()
    with EagerSGD(_inner("momentum", model), model.named_parameters(), comm=comm, quorum=quorum) as optimizer:
        for step in range(STEPS):
            comm.elapse(1e-3 * (1 + comm.rank % 3))
            _backward(model, optimizer, comm, step)
            optimizer.step()
    return _parts(model, {})


def _parts(model: nn.Module, state: Any) -> tuple[Any, Any, Any]:
    held = state
    while isinstance(held, dict) and BY_PARAMETER[0] not in held and len(held) == 1:
        held = next(iter(held.values()))
    kept = {name: held.get(name, {}) for name in BY_PARAMETER} if isinstance(held, dict) else {}
    return dict(model.named_parameters()), kept, state


def _quietly(case: Case) -> Case:
    def quiet(comm: Communicator) -> tuple[Any, Any, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return case(comm)

    return quiet


def hashed(ranks: Sequence[tuple[Any, Any, Any]]) -> list[str]:
    """A hash of each part, over the ranks in order."""
    made = []
    for part in zip(*ranks, strict=True):
        hashing = hashlib.sha256()
        for one in part:
            _add(hashing, one)
        made.append(hashing.hexdigest()[:12])
    return made


def _add(hashing: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            hashing.update(str(key).encode())
            _add(hashing, value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(hashing, one)
    elif isinstance(value, SparseVector):
        _add(hashing, [value.indices, value.values])
    elif isinstance(value, Tensor):
        hashing.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        hashing.update(repr(value).encode())


def _real(only: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for transport, sizes in REAL_SIZES.items():
        for size in sizes:
            with unhindered(size) as ranks:
                told = dict(found_by(ranks, on_rank, only, mpi=transport == "mpi", timeout=600))
            found |= {f"{name}, {transport} {size}": hashes for name, hashes in told.items()}
    return found


def on_rank(only: str) -> None:
    """One rank's part; rank 0 tells each case's name and hashes."""
    world = None
    made = _adapters_of_torch() if torch.distributed.is_initialized() else {}
    if not made:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    comm = as_communicator(world)
    for name, case in {**made, **dict(_few(world))}.items():
        if only in name:
            before = comm.bytes_sent
            parts = (*_quietly(case)(comm), comm.bytes_sent - before)
            ranks = [parts] * comm.size
            if world is not None:
                ranks = world.allgather(parts)
            else:
                torch.distributed.all_gather_object(ranks, parts)
            if comm.rank == 0:
                tell([name, [*hashed([rank[:3] for rank in ranks]), [rank[3] for rank in ranks]]])


def _few(world: Any = None) -> Iterator[tuple[str, Case]]:
    size = as_communicator(world).size
    for name, case in cases(size):
        words = name.split()
        if words[0] in ("call", "gradients", "updates", "periodic") and ("fp32" in words or words[0] == "periodic"):
            yield name, case


def _adapters_of_torch() -> dict[str, Case]:
    """The DDP hook, and at four ranks HSDP: two nodes of two."""
    made: dict[str, Case] = {}
    for algorithm in (*SPARSE, "dense", "powersgd", "dense-int8"):
        density = 0.05 if algorithm in SPARSE else None
        for wire, momentum in (("fp32", 0.9), ("bf16-packed", 0.0)) if density else (("fp32", 0.0),):
            ways: dict[str, Any] = {"algorithm": algorithm, "density": density, "wire": wire, "momentum": momentum}
            made[f"hook {algorithm} {wire}"] = partial(_hook, **ways)
        if torch.distributed.get_world_size() == 4:
            made[f"hsdp {algorithm}"] = partial(_hsdp, algorithm=algorithm, density=density)
    return made


def _hook(comm: Communicator, **ways: Any) -> Any:
    model = _model()
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
    state = SparseHookState(named_parameters=list(model.named_parameters()), **ways)
    ddp.register_comm_hook(state, sparse_hook)
    _train(ddp, _inner("sgd", model), comm)
    return _parts(model, state.state_dict())


def _hsdp(comm: Communicator, **ways: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside")), _model()
    fully_shard(model, mesh=mesh["inside"])
    state = sparse_hsdp(model, mesh["between"], **ways)
    _train(model, _inner("sgd", model), comm)
    shards = {name: p.to_local() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    _, kept, saved = _parts(model, state.state_dict())
    return shards, kept, saved
