"""Every algorithm on every wire: the laws, exact bytes, and what cannot be sent so."""

import pytest
import torch
from communicators import Alone, CollectiveError, Corrupts, Link, SimulatedWorld, testing
from data_parallel import DistributedOptimizer, SparseHookState
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_collectives import ALGORITHMS, WIRES, sparse_allreduce
from sparse_collectives.algorithms.table import resolve
from sparse_collectives.prediction.cost import Handling, predict
from sparse_collectives.testing import check_sparse_call
from sparse_compress import TopK, topk
from torch import nn

SPARSE = [name for name, entry in ALGORITHMS.items() if entry.selects]
every_algorithm = pytest.mark.parametrize("name", SPARSE)
coded = st.sampled_from([wire for wire in WIRES if wire != "fp32"])
every_wire = pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "fp32"])


@every_algorithm
@settings(max_examples=settings.default.max_examples * 4 // 5)
@given(wire=coded, data=st.data())
def test_laws(name, wire, data):
    """Integers up to 10,000: most wires must round them."""
    size, numel = data.draw(testing.world_sizes()), data.draw(st.integers(1, 60))
    k, seed = data.draw(st.integers(1, numel + 3)), data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    dense = [torch.randint(-(10**4), 10**4, (numel,), generator=generator).float() for _ in range(size)]
    check_sparse_call(name, [topk(x, data.draw(st.integers(0, numel))) for x in dense], k=k, wire=wire)


@pytest.mark.few(14)
@pytest.mark.parametrize("options", [{"teams": 2}, {"teams": 3}, {"teams": 6}, {"teams": 6, "sag": "b-sag"}], ids=str)
@every_wire
def test_laws_in_teams(wire, options):
    dense = [
        torch.randint(-999, 999, (70,), generator=torch.Generator().manual_seed(rank)).float() for rank in range(6)
    ]
    check_sparse_call("spardl", [topk(x, 30) for x in dense], k=20, wire=wire, options=options)


@every_algorithm
def test_laws_with_many_ranks(name):
    generator = torch.Generator().manual_seed(14)
    dense = [torch.randint(-999, 1000, (257,), generator=generator).float() for _ in range(14)]
    check_sparse_call(name, [topk(x, 7) for x in dense], k=7, wire="bf16-packed")


@every_algorithm
@settings(max_examples=settings.default.max_examples * 4 // 5)
@given(wire=coded, data=st.data())
def test_ranks_agree_on_any_floats(name, wire, data):
    size, n = data.draw(testing.world_sizes(8)), data.draw(st.integers(1, 20))
    row = st.lists(st.floats(width=32), min_size=n, max_size=n)  # NaN, infinities, denormals, −0 and ties among them
    dense = [torch.tensor(data.draw(row)) for _ in range(size)]
    world = SimulatedWorld(size, seed=1, jitter=1e-3)
    results = world.run(lambda c: sparse_allreduce(topk(dense[c.rank], 3), c, k=3, algorithm=name, wire=wire))
    for result in results:
        assert torch.equal(result.total.pack()[16:], results[0].total.pack()[16:])
    if not all(x.isfinite().all() for x in dense):
        assert not results[0].total.values.isfinite().all()


@every_wire
@every_algorithm
def test_a_rank_alone_rounds_nothing(name, wire):
    x = torch.randn(50)
    [reduction] = SimulatedWorld(1).run(lambda c: sparse_allreduce(topk(x, 5), c, k=5, algorithm=name, wire=wire))
    assert torch.equal(reduction.total.to_dense(), topk(x, 5).to_dense())
    assert not reduction.dropped.values.any()


@pytest.mark.parametrize(("wire", "entry_bits"), [("bf16", 48), ("int8", 40), ("bf16-packed", 25), ("int8-packed", 17)])
@every_algorithm
def test_bytes_at_one_percent(name, wire, entry_bits):
    """Packed indices: 6 low bits of log₂ 100, and 1 + 100/64 in unary."""
    size, n, k = 8, 10**6, 10**4

    def sent(way):
        return resolve(name, size=size, wire=way).typical(0, size, k, n, torch.float32).nbytes

    assert sent(wire) / sent("fp32") == pytest.approx(entry_bits / 64, abs=0.06)


@every_algorithm
def test_residuals_take_what_was_rounded_off(name):
    """Over a run of the optimizer: what all ranks gave is what was applied and what still waits."""

    def body(comm):
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(60))})
        options = {"comm": comm, "algorithm": name, "compressor": TopK(0.1), "wire": "int8-packed"}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options
        )
        given = torch.zeros(60)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            model["w"].grad = torch.randint(-999, 1000, (60,), generator=generator).float()
            given += model["w"].grad
            optimizer.step()
        return given, -4 * model["w"].detach(), optimizer.state_dict()["distributed"]["residuals"]["w"]

    results = SimulatedWorld(4).run(body)
    given, kept = (sum(result[part] for result in results) for part in (0, 2))
    assert all(torch.equal(given, applied + kept) for _, applied, _ in results)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("wire", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dense_in_half_precision(wire, dtype, overlap):
    gradients = torch.randn(4, 600)

    def body(comm):
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(600))})
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"comm": comm, "algorithm": "dense", "wire": wire, "overlap": overlap}
        optimizer = DistributedOptimizer(inner, model.named_parameters(), **settings)
        before = comm.bytes_sent
        (model["w"] * gradients[comm.rank]).sum().backward()
        optimizer.step()
        return -model["w"].detach(), comm.bytes_sent - before

    results = SimulatedWorld(4).run(body)
    for mean, sent in results:
        assert torch.equal(mean, results[0][0])
        assert torch.allclose(mean, gradients.mean(0), atol=4 * torch.finfo(dtype).eps)
        assert sent == 2 * (2 * 600 + 16)


@every_algorithm
def test_ranks_on_other_wires(name):
    def body(comm):
        with pytest.raises(CollectiveError) as error:
            sparse_allreduce(topk(torch.ones(9), 3), comm, k=3, algorithm=name, wire=("bf16", "int8")[comm.rank % 2])
        return str(error.value)

    told = SimulatedWorld(3).run(body)
    assert len(set(told)) == 1
    assert "wire=bf16" in told[0]
    assert "wire=int8" in told[0]


@every_wire
@every_algorithm
def test_a_corrupted_message_fails_on_all_ranks(name, wire):
    def body(comm):
        with pytest.raises(CollectiveError) as error:
            twice(comm)
        return str(error.value)

    def twice(comm):  # a rank that had already got everything learns it at its next call
        for _ in range(2):
            sparse_allreduce(topk(torch.ones(10), 2), comm, k=2, algorithm=name, wire=wire)

    told = SimulatedWorld(3, faults=[Corrupts(rank=1)]).run(body)
    assert len(set(told)) == 1


def test_wrong_wires_say_what_is_right():
    def call(comm, **wrong):
        sparse_allreduce(topk(torch.ones(9, dtype=wrong.pop("dtype", torch.float32)), 3), comm, k=3, **wrong)

    comm = Alone()
    with pytest.raises(ValueError, match=r"unknown wire 'fp8'; known: fp32, bf16, .*int8-packed"):
        call(comm, wire="fp8")
    with pytest.raises(TypeError, match=r"wire='bf16' carries float32 values, but these are torch\.float64"):
        call(comm, wire="bf16", dtype=torch.float64)
    with pytest.raises(ValueError, match="dense sends values as they are"):
        call(comm, wire="bf16", algorithm="dense")
    with pytest.raises(ValueError, match="unknown wire 'fp8'"):
        call(comm, wire="fp8", algorithm="auto", state={})
    for algorithm, wire, says in (("dense", "int8", "one of fp32, bf16, fp16"), ("gtopk", "bf8", "unknown wire 'bf8'")):
        with pytest.raises(ValueError, match=says):
            SparseHookState(comm, algorithm=algorithm, wire=wire)
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(ValueError, match=says):
            DistributedOptimizer(inner, model.named_parameters(), comm=comm, algorithm=algorithm, wire=wire)
    model = nn.Linear(2, 1).double()
    with pytest.raises(TypeError, match="carries float32"):
        DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), comm=comm, wire="bf16"
        )


@every_algorithm
def test_predictions_know_the_wire(name):
    """Fewer bytes, and coding on top."""
    situation = {"size": 4, "numel": 10**6, "k": 10**4, "link": Link(0.0, 1e-6)}
    plain, packed = (predict(name, wire=wire, **situation) for wire in ("fp32", "bf16-packed"))
    costs = {name: 1e-7, f"{name} in bf16-packed": 3e-7}
    dear = [predict(name, wire=wire, handling=Handling(merge=costs), **situation) for wire in ("fp32", "bf16-packed")]
    assert packed.nbytes < 0.45 * plain.nbytes
    assert packed.seconds < 0.45 * plain.seconds
    assert packed.name == f"{name} in bf16-packed"
    assert dear[1].merging == pytest.approx(3 * dear[0].merging)
