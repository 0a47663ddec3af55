"""What a device's tensors take part in, on a device that is only pretended: the laws, and what a CPU gives."""

import copy

import pytest
import torch
from communicators import SimulatedWorld
from data_parallel import SparseHookState, sparse_hook
from devices import CPU, DEVICE, needs_pretend
from sparse_collectives import ALGORITHMS, sparse_allreduce
from sparse_compress import SparseVector, topk
from torch import nn

pytestmark = needs_pretend
SPARSE = [name for name, entry in ALGORITHMS.items() if entry.selects]
every_algorithm = pytest.mark.parametrize("name", SPARSE)
every_wire = pytest.mark.parametrize("wire", ["fp32", "bf16-packed"])
every_way = pytest.mark.parametrize(("size", "wire"), [(3, "bf16-packed"), (8, "fp32")])


def reduced(vectors, **given):
    """The reduction on each rank of a simulated world; the bytes that its ranks sent."""
    world = SimulatedWorld(len(vectors))
    return world.run(lambda comm: sparse_allreduce(vectors[comm.rank], comm, **given)), world.bytes_sent


def check(name, vectors, k, wire="fp32", **options):
    """Conservation, agreement, totals and bytes; the results, in host memory."""
    given = {"k": k, "algorithm": name, "wire": wire, "options": options}
    expected, nbytes = reduced(vectors, **given)
    results, sent = reduced([on_device(vector) for vector in vectors], **given)
    assert {x.total.device for x in results} | {x.dropped.device for x in results} == {DEVICE}
    total = dense(results[0].total)
    assert torch.equal(total, dense(expected[0].total))
    for result in results:
        assert torch.equal(result.total.pack().cpu()[16:], results[0].total.pack().cpu()[16:])
    assert torch.equal(sum(map(dense, vectors)), total + sum(dense(result.dropped) for result in results))
    assert sent == nbytes
    return results


def on_device(sparse):
    return SparseVector(sparse.indices.to(DEVICE), sparse.values.to(DEVICE), sparse.numel)


def dense(sparse):
    """In host memory; checked, as the constructor checks what it is given."""
    return SparseVector(sparse.indices, sparse.values, sparse.numel).to_dense().cpu()


def integers(size, n, most):
    generator = torch.Generator().manual_seed(size)
    return [torch.randint(-most, most + 1, (n,), generator=generator).float() for _ in range(size)]


@pytest.mark.few(4)
@every_algorithm
@every_way
def test_laws(name, wire, size):
    """Small integers tie and cancel; large ones are rounded."""
    for n, k, most in [(33, 5, 3), (33, 40, 999), (257, 60, 999)] if size < 8 else [(257, 60, 999)]:
        check(name, [topk(x, k) for x in integers(size, n, most)], k, wire)


@pytest.mark.few(4)
@every_algorithm
@every_way
def test_the_same_entries_on_all_ranks(name, wire, size):
    """A sum has a P-th of the entries that a device makes room for."""
    for n, k in [(5, 2), (1000, 50)]:
        check(name, [topk(torch.arange(1.0, n + 1), k)] * size, k, wire)


@pytest.mark.few(2)
@every_algorithm
@pytest.mark.parametrize(("size", "wire"), [(2, "bf16-packed"), (3, "fp32")])
def test_tiny_and_empty_vectors(name, wire, size):
    for n in (1, 2, 9):
        inputs = integers(size, n, 9)
        for entries in {0, n}:
            check(name, [topk(x, entries) for x in inputs], 1, wire)
        check(name, [topk(x, n * (rank == 1)) for rank, x in enumerate(inputs)], n, wire)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("size", "teams", "sag", "wire"),
    [(4, 2, "r-sag", "bf16-packed"), (6, 3, "b-sag", "fp32"), (6, 6, "b-sag", "bf16-packed"), (8, 2, "b-sag", "fp32")],
)
def test_spardl_in_teams(wire, size, teams, sag):
    for n, k in [(33, 2), (257, 30)]:
        vectors = [topk(x, k) for x in integers(size, n, 99)]
        check("spardl", vectors, k, wire, teams=teams, sag=sag)
        check("spardl", vectors[:1] * size, k, wire, teams=teams, sag=sag)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("topk-allgather", {}),
        ("topk-dsa", {}),
        ("gtopk", {}),
        ("oktopk", {"thresholds_every": 2, "boundaries_every": 3}),
        ("spardl", {}),
        ("spardl", {"teams": 3}),
    ],
)
def test_calls_give_the_floats_and_states_that_they_give_on_a_cpu(name, options):
    inputs = torch.randn(4, 6, 101, generator=torch.Generator().manual_seed(0))

    def body(comm, device):
        state, seen = ALGORITHMS[name].initial_state(), []
        given = {"k": 30, "algorithm": name, "options": options, "state": state}
        for x in inputs[:, comm.rank]:
            total = sparse_allreduce(topk(x.to(device), 30), comm, **given).total
            seen.append((dense(total).tolist(), copy.deepcopy(state)))
        return seen

    on_cpu, on_gpu = (SimulatedWorld(6).run(lambda comm, at=at: body(comm, at)) for at in (CPU, DEVICE))
    assert on_gpu == on_cpu


@every_wire
def test_oktopk_returns_entries_to_the_residuals_of_a_cpu(wire):
    """Also of sums that cancel: they are entries of the total on a device too."""
    x = integers(1, 60, 9)[0]
    vectors = [topk(sign * x, 40) for sign in (1, -1, 1, -1)]

    on_cpu, _ = reduced(vectors, k=40, algorithm="oktopk", wire=wire)
    on_gpu, _ = reduced([on_device(vector) for vector in vectors], k=40, algorithm="oktopk", wire=wire)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(dense(one.dropped), dense(other.dropped))


@every_algorithm
def test_what_is_not_finite_is_seen(name):
    inputs = [torch.tensor([3.0, 0, rank, 0, torch.inf if rank else 1, 0, torch.nan, 5]) for rank in range(3)]

    results, _ = reduced([topk(x.to(DEVICE), 4) for x in inputs], k=4, algorithm=name)
    for result in results:
        assert not result.total.values.isfinite().all()


def test_topk_dsa_takes_no_zeros_of_other_blocks():
    x = torch.zeros(24)
    x[[0, 21, 22, 23]] = torch.tensor([5.0, 1, 2, 3])
    assert check("topk-dsa", [topk(x, 4)] * 2, 4)[0].total.indices.tolist() == [0, 21, 22, 23]


def test_topk_dsa_in_dense_blocks():
    ends = torch.tensor([[0.0, 0, 0, 0, 3, 2, 0, 0], [0, 0, 0, 0, 1, 4, 0, 0]])
    check("topk-dsa", [topk(x, 2) for x in ends], 2)


def test_oktopk_keeps_no_zeros_of_other_regions():
    ends = torch.tensor([[3.0, 0, 0, 0, 0, 0, 2, 0], [1.0, 0, 0, 0, 0, 0, 4, 0]])
    assert check("oktopk", [topk(x, 4) for x in ends], 4)[0].total.indices.tolist() == [0, 6]


class GradBucket:
    """What the hook asks of DDP's, which DDP makes only on devices that it knows."""

    def __init__(self, flat, parameters, index, is_last):
        self.buffer, self.parameters = (lambda: flat), (lambda: parameters)
        self.index, self.is_last = (lambda: index), (lambda: is_last)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_hook_loses_nothing(name, scale):
    """Σ of all gradients = Σ of what was applied + residuals, in two buckets, with gradients that are all zeros."""
    shapes, spans = {"a": (3, 4), "b": (5,), "c": (7, 2)}, {("a", "b"): slice(0, 17), ("c",): slice(17, 31)}

    def body(comm):
        parameters = {key: nn.Parameter(torch.zeros(shape, device=DEVICE)) for key, shape in shapes.items()}
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale > 1 else None
        if scaler is not None:
            scaler.scale(torch.ones(1))
        density = 0.2 if name in SPARSE else None
        state = SparseHookState(
            comm, density=density, algorithm=name, grad_scaler=scaler, named_parameters=parameters.items()
        )
        given, applied = torch.zeros(2, 31)
        for step in range(4):
            for index, (members, span) in enumerate(spans.items()):
                gradient = integers(comm.size, 31, 9)[comm.rank][span] * (step % 2 or comm.rank % 2 or index == 0)
                given[span] += gradient
                own = [parameters[key] for key in members]
                for p in own:  # autograd tells the hook of a new step
                    p.grad = None
                    p.clone().backward(torch.zeros_like(p))
                bucket = GradBucket((gradient * scale).to(DEVICE), own, index, index == len(spans) - 1)
                applied[span] += sparse_hook(state, bucket).wait().cpu() / scale * comm.size
        residuals = state.state_dict()["distributed"]["residuals"]
        assert {residual.device for residual in residuals.values()} <= {DEVICE}
        kept = [residuals[key].cpu().view(-1) for key in shapes] if residuals else [torch.zeros(31)]
        return given, applied, torch.cat(kept)

    results = SimulatedWorld(4).run(body)
    given, residuals = (sum(result[i] for result in results) for i in (0, 2))
    for _, applied, _ in results:
        assert torch.equal(given, applied + residuals)
