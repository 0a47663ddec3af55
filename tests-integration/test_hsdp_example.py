"""The example of hybrid sharding, as its users start it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "hsdp" / "digits.py"


@pytest.mark.few(0)
def test_it_learns_on_two_nodes_of_two():
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*launch, SCRIPT, "3"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    accuracy, sent = re.search(r"test accuracy ([\d.]+) %, ([\d,]+) bytes", done.stdout).groups()
    assert float(accuracy) > 60
    assert int(sent.replace(",", "")) < 3 * 22 * 2 * 4 * 85_002 / 2 / 10  # a tenth of what a dense sum sends of a part
