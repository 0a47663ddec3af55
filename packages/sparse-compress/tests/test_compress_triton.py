"""The GPU's kernels without a GPU: in Triton's interpreter, and compiled ahead of time. Each in a process of its own,
because what TRITON_INTERPRET says when the kernels are imported is final.

On a GPU the tests marked so in the other files repeat the laws, and those here: capture, streams and alignment.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sparse_compress import ErrorFeedback, TopK, selection, topk

HERE = Path(__file__).parent
HAS_TRITON = find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
needs_new_triton = pytest.mark.skipif(
    HAS_TRITON and tuple(map(int, version("triton").split(".")[:2])) < (3, 3),
    reason="calls the compiler as of Triton 3.3",
)


def run(script, tmp_path, **environment):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, HERE / script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("dtype", "contiguous", "numel", "takes"),
    [
        (torch.float32, True, 8, HAS_TRITON),
        (torch.float16, True, selection.MAX_ELEMENTS, HAS_TRITON),
        (torch.float64, True, 8, False),
        (torch.float32, False, 8, False),
        (torch.float32, True, selection.MAX_ELEMENTS + 1, False),
    ],
)
def test_on_a_gpu_the_kernels_take_what_they_can(dtype, contiguous, numel, takes):
    there = SimpleNamespace(is_cuda=True, dtype=dtype, is_contiguous=lambda: contiguous, numel=lambda: numel)
    assert selection._triton_takes(there) is takes


@needs_triton
def test_kernels_select_the_same_bits_as_the_cpu(tmp_path):
    run("triton_interpreter.py", tmp_path, TRITON_INTERPRET="1")


MOST_REGISTERS = {
    "accumulate": 48, "find_maxima": 40, "count_digits": 80, "pick_digit": 32,
    "count_lines": 40, "list_lines": 64, "count_selected": 48,
}  # fmt: skip
READ_LITTLE = {"pick_digit", "count_lines", "list_lines", "write_selected"}


@pytest.mark.few(0)
@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux")
@needs_new_triton
def test_kernels_compile_without_spills(tmp_path):
    """128 registers leave two programs of 8 warps to a multiprocessor, 80 six of 4 warps, 48 ten."""
    compiled = [json.loads(line) for line in run("triton_compile.py", tmp_path).splitlines()]
    assert {facts["sm"] for facts in compiled} == {80, 90}
    assert {facts["kernel"] for facts in compiled} == {*MOST_REGISTERS, "write_selected"}
    for facts in compiled:
        assert facts["spilled"] == 0, facts
        assert facts["registers"] <= MOST_REGISTERS.get(facts["kernel"], 128), facts
        assert facts["fused or flushed"] == 0, facts  # sums are rounded as on a CPU
        if facts["kernel"] not in READ_LITTLE:
            assert facts["wide loads"] > 0, facts


def test_cpu_tensors_need_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, sparse_compress as s\n"
        "feedback = s.ErrorFeedback(s.TopK(0.01))\n"
        "sent = feedback.compress('w', torch.randn(100_000))\n"
        "s.merge(sent, sent, 10)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_any_alignment_and_dtype(self, dtype):
        x = torch.randn(100_003, device="cuda").to(dtype)
        for start in (0, 1, 2, 3, 8):
            assert torch.equal(topk(x[start:], 999).pack().cpu(), topk(x[start:].cpu(), 999).pack())

    def test_same_bits_run_to_run(self):
        x = torch.randint(-9, 9, (1_000_000,), device="cuda").float()
        first = topk(x, 5000).pack()
        assert all(torch.equal(topk(x, 5000).pack(), first) for _ in range(20))

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_a_step_is_captured_in_a_graph_and_never_waits(self, momentum):
        gradient = torch.randn(300_000, device="cuda")
        captured, plain = (ErrorFeedback(TopK(0.01), momentum=momentum) for _ in range(2))
        for _ in range(2):  # compiles
            captured.compress("w", gradient)
            plain.compress("w", gradient)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            plain.compress("w", gradient)
            with torch.cuda.graph(graph):
                sent = captured.compress("w", gradient)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        assert torch.equal(captured.residual("w"), plain.residual("w"))
        gradient.normal_()
        graph.replay()
        assert torch.equal(sent.pack(), plain.compress("w", gradient).pack())

    def test_more_than_a_billion_elements(self):
        n = 1_200_000_000
        if torch.cuda.get_device_properties(0).total_memory < 16 * n:
            pytest.skip("needs 20 GB")
        x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        x[-3:] = torch.tensor([1.0, 3.0, 2.0])
        assert topk(x, 2).indices.tolist() == [n - 2, n - 1]
