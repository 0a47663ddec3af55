"""torch.set_default_device says where a user's tensors are made, and moves none of ours."""

import ast
from pathlib import Path

import pytest
import torch
from communicators import SimulatedWorld, allgather, barrier, broadcast
from sparse_collectives import ALGORITHMS, resolve, sparse_allreduce
from sparse_compress import RandomK, topk

PACKAGES = Path(__file__).parents[1] / "packages"
MAKES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
MAKES |= {"asarray", "tensor", "zeros"}
OF_PROGRAMS = {"slow-link"}
"""Packages whose tensors stay among themselves."""


def anywhere(path):
    """Calls that make a tensor wherever torch's default is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKES:
            ours = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if ours and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                yield f"{path.relative_to(PACKAGES)}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_is_made_on_a_device_that_is_named():
    sources = [path for path in PACKAGES.glob("*/src/**/*.py") if path.name != "testing.py"]
    found = [
        call for path in sources if path.relative_to(PACKAGES).parts[0] not in OF_PROGRAMS for call in anywhere(path)
    ]
    assert not found, f"add device=, such as that of a tensor beside it, or 'cpu' for host memory: {found}"


@pytest.mark.parametrize("wire", ["fp32", "bf16-packed", "int8"])
def test_calls_on_other_devices_than_the_default(wire):
    def body(comm):
        x = torch.arange(50, dtype=torch.float32, device="cpu") * (comm.rank + 1)
        with torch.device("meta"):
            barrier(comm)
            assert allgather(broadcast(x, comm), comm)[1].is_cpu
            assert RandomK(0.1)(x).is_cpu
            for name, entry in ALGORITHMS.items():
                given = {} if entry.initial_state() is None else {"state": resolve(name, size=3).initial_state()}
                on = wire if entry.takes_wire else "fp32"
                yield sparse_allreduce(topk(x, 5), comm, k=5, algorithm=name, wire=on, **given).total.to_dense()

    totals = SimulatedWorld(3).run(lambda comm: list(body(comm)))
    with torch.device("cpu"):
        assert all(torch.equal(one, first) for one, first in zip(totals[1], totals[0], strict=True))
