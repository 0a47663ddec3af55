"""Arguments of a call that are wrong by type are told at the edge, on that rank, before anything is sent."""

import numpy as np
import pytest
import torch
from communicators import CollectiveError, SimulatedWorld, as_communicator
from sparse_collectives import (
    ALGORITHMS,
    sparse_allreduce,
    sparse_allreduce_array,
    sparse_allreduce_array_async,
    sparse_allreduce_async,
)
from sparse_compress import topk

pytestmark = pytest.mark.quick

alone = as_communicator(None)
OKTOPK, SPARDL = ALGORITHMS["oktopk"].initial_state(), ALGORITHMS["spardl"].initial_state()
CHOSEN = {"algorithm": "gtopk", "options": {}, "wire": "fp32", "state": None, "table": ""}

WRONG = [
    ({"k": 1.0}, TypeError, r"k is 1\.0 \(float\), expected an integer: the most entries"),
    ({"k": True}, TypeError, "k is True"),
    ({"k": "3"}, TypeError, "k is '3'"),
    ({"k": None}, TypeError, "k is None"),
    ({"k": 0}, ValueError, "k is 0, expected the most entries that a rank may contribute, 1 or more"),
    ({"algorithm": 3}, TypeError, "algorithm is 3, expected a name: dense, topk-allgather"),
    ({"algorithm": ["gtopk"]}, TypeError, r"algorithm is \['gtopk'\]"),
    ({"algorithm": None}, TypeError, "algorithm is None"),
    ({"algorithm": ALGORITHMS["gtopk"].schedule}, TypeError, "or an Algorithm of your own"),
    ({"algorithm": np.array(["gtopk", "dense"])}, TypeError, "expected a name"),
    ({"wire": 16}, TypeError, "wire is 16, expected a name: fp32, bf16"),
    ({"wire": ["bf16"]}, TypeError, r"wire is \['bf16'\]"),
    ({"wire": None}, TypeError, "wire is None"),
    ({"wire": torch.bfloat16}, TypeError, "wire is torch.bfloat16"),
    ({"algorithm": "spardl", "options": {"teams": 1.0}}, TypeError, r"teams is 1\.0 \(float\), expected an integer"),
    ({"algorithm": "spardl", "options": {"teams": True}}, TypeError, "teams is True"),
    ({"algorithm": "spardl", "options": {"teams": "1"}}, TypeError, "teams is '1'"),
    ({"algorithm": "spardl", "options": {"teams": None}}, TypeError, "teams is None"),
    ({"algorithm": "spardl", "options": {"sag": 1}}, TypeError, "sag is 1, expected a str, as 'auto'"),
    ({"algorithm": "spardl", "options": {"sag": ["auto"]}}, TypeError, r"sag is \['auto'\]"),
    ({"algorithm": "spardl", "options": {"sag": "c-sag"}}, ValueError, "sag is 'c-sag'"),
    ({"algorithm": "spardl", "options": {"teams": 0}}, ValueError, "teams is 0"),
    ({"algorithm": "oktopk", "options": {"thresholds_every": 2.5}}, TypeError, r"thresholds_every is 2\.5"),
    ({"algorithm": "oktopk", "options": {"boundaries_every": "64"}}, TypeError, "boundaries_every is '64'"),
    ({"algorithm": "oktopk", "options": {"boundaries_every": 0}}, ValueError, "boundaries_every 0"),
    ({"algorithm": "spardl", "options": ["teams"]}, TypeError, r"options is \['teams'\], expected a dict"),
    ({"algorithm": "spardl", "options": "teams=2"}, TypeError, "options is 'teams=2', expected a dict"),
    ({"algorithm": "spardl", "options": {1: 2, "x": 3}}, ValueError, "spardl has no option 1, x"),
    ({"algorithm": "auto", "options": [1], "state": {}}, TypeError, "options is"),
    ({"algorithm": "oktopk", "state": []}, TypeError, "state is list, expected a dict"),
    ({"algorithm": "oktopk", "state": "x"}, TypeError, "state is str, expected a dict"),
    ({"algorithm": "oktopk", "state": {}}, ValueError, "state has the keys .*expected .*boundaries"),
    ({"algorithm": "oktopk", "state": SPARDL}, ValueError, "state has the keys .*entries.*expected .*boundaries"),
    ({"algorithm": "spardl", "state": OKTOPK}, ValueError, "state has the keys .*boundaries.*expected .*entries"),
    ({"algorithm": "spardl", "state": {**SPARDL, "version": 2}}, ValueError, "version.*expected"),
    ({"algorithm": "spardl", "state": {**SPARDL, "step": "3"}}, ValueError, "state's step is '3'"),
    ({"algorithm": "spardl", "state": {**SPARDL, "step": -1}}, ValueError, "state's step is -1"),
    ({"algorithm": "spardl", "state": {**SPARDL, "step": 1.0}}, ValueError, r"state's step is 1\.0"),
    ({"algorithm": "spardl", "state": {**SPARDL, "entries": -1}}, ValueError, "state's entries is -1"),
    ({"algorithm": "spardl", "state": {**SPARDL, "of": "x"}}, ValueError, "state's of is 'x'"),
    ({"algorithm": "oktopk", "state": {**OKTOPK, "step": True}}, ValueError, "state's step is True"),
    ({"algorithm": "oktopk", "state": {**OKTOPK, "local": None}}, ValueError, "state's local is None"),
    ({"algorithm": "oktopk", "state": {**OKTOPK, "threshold": 0.5}}, ValueError, r"state's threshold is 0\.5"),
    ({"algorithm": "oktopk", "state": {**OKTOPK, "boundaries": 3}}, ValueError, "state's boundaries is 3"),
    ({"algorithm": "oktopk", "state": {**OKTOPK, "of": [1, 2]}}, ValueError, r"state's of is \[1, 2\]"),
    (
        {"algorithm": "oktopk", "state": {**OKTOPK, "step": 1, "of": [1, 1, 3, "torch.float32"]}},
        ValueError,
        r"boundaries is \[\]",
    ),
    (
        {"algorithm": "oktopk", "state": {**OKTOPK, "boundaries": [0, 4], "of": [1, 1, 3, "torch.float32"]}},
        ValueError,
        r"boundaries is \[0, 4\]",
    ),
    ({"algorithm": "gtopk", "state": {}}, ValueError, "gtopk keeps no state"),
    ({"algorithm": "auto", "state": []}, TypeError, "state is list, expected a dict"),
    ({"algorithm": "auto", "state": OKTOPK}, ValueError, "the state of another algorithm"),
    ({"algorithm": "auto", "state": {"k": {**CHOSEN, "algorithm": 3}}}, ValueError, "the state of another algorithm"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "error", "says"), WRONG, ids=map(str, range(len(WRONG))))
@pytest.mark.parametrize(
    ("call", "given"),
    [
        *((call, topk(torch.ones(3), 1)) for call in (sparse_allreduce, sparse_allreduce_async)),
        *((call, np.ones(3)) for call in (sparse_allreduce_array, sparse_allreduce_array_async)),
    ],
)
def test_wrong_arguments(call, given, arguments, error, says):
    with pytest.raises(error, match=says):
        call(given, alone, **{"k": 1, **arguments})


@pytest.mark.parametrize(
    "arguments", [arguments for arguments, _, _ in WRONG if str(arguments.get("algorithm")) == "spardl"], ids=str
)
def test_the_other_ranks_hear_of_it(arguments):
    told = {}

    def body(comm):
        wrong = arguments if comm.rank == 1 else {"algorithm": "spardl"}
        try:
            sparse_allreduce(topk(torch.ones(9), 3), comm, k=3, **wrong)
        except CollectiveError as error:
            told[comm.rank] = str(error)

    with pytest.raises((TypeError, ValueError)):
        SimulatedWorld(3).run(body)
    assert set(told) == {0, 2}
    assert "rank 1 failed in its own code" in told[0]


def test_numbers_of_numpy_are_numbers():
    sparse = topk(torch.ones(9), 3)
    [one] = SimulatedWorld(1).run(
        lambda c: sparse_allreduce(sparse, c, k=np.int64(3), algorithm="spardl", options={"teams": np.int32(1)})
    )
    assert torch.equal(one.total.to_dense(), sparse.to_dense())
