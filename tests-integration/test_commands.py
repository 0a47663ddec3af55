"""The short commands are those of the apps."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.few(1)
@pytest.mark.parametrize("short", ["cifar", "deepspeech", "text", "trainer.plot"])
def test_a_short_command_is_the_apps_own(short):
    texts = [
        subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, check=True).stdout
        for name in (short, f"thinwire_{short}")
    ]
    assert texts[0] == texts[1]
    assert "usage: " in texts[0]
