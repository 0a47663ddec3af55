"""What a step of error feedback takes of a process of its own: no n-sized temporary, and one thread."""

import subprocess
import sys

import pytest


def peak_rss_growth(dtype, view):
    """MiB by which the peak of a process grows in one more step over 64 MiB of residual, in a process of its own."""
    code = (
        "import resource, torch\n"
        "from sparse_compress import ErrorFeedback, TopK\n"
        "torch.set_num_threads(1)\n"
        "feedback = ErrorFeedback(TopK(0.001))\n"
        f"gradient = torch.randn(1 << 12, 1 << 12).to(torch.{dtype}){view}\n"
        "feedback.compress('w', gradient[:1 << 8])\n"  # libraries and buffers
        "feedback.load_state_dict({'residuals': {}, 'velocities': {}})\n"
        "feedback.adopt('x', torch.ones_like(gradient, dtype=torch.float32, memory_format=torch.contiguous_format))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "feedback.compress('x', gradient)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.few(2)
@pytest.mark.parametrize(("dtype", "view"), [("float32", ""), ("bfloat16", ""), ("float32", ".T")])
def test_no_temporary_of_the_gradients_size(dtype, view):
    assert peak_rss_growth(dtype, view) < 12


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")
def test_one_thread_whatever_torch_may_take():
    code = (
        "import os, torch\n"
        "from sparse_compress import ErrorFeedback, TopK, merge\n"
        "def step(gradient):\n"
        "    sent = feedback.compress(str(gradient.dtype), gradient)\n"
        "    merge(sent, sent, 40_000)\n"
        "torch.set_num_threads(1)\n"
        "feedback = ErrorFeedback(TopK(0.05), momentum=0.9)\n"
        "gradients = torch.randn(1_000_000), torch.randn(1_000_000).bfloat16()\n"
        "for gradient in gradients: step(gradient)\n"  # the first step allocates residuals by torch
        "torch.set_num_threads(4)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "for gradient in gradients: step(gradient)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
        "gradients[0].add_(1)\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    started_by_us, started_by_torch = map(int, done.stdout.split())
    assert started_by_us == 0 < started_by_torch
