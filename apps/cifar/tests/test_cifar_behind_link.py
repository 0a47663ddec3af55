"""What the demo says of steps behind a slow link: figures, or why there are none."""

import importlib.util
import subprocess
import sys

import pytest
from thinwire_cifar import behind_link


def test_measured_and_predicted_stand_side_by_side() -> None:
    found = {"dense": {"measured": 0.2, "predicted": 0.19}, "gtopk": {"measured": 0.1, "predicted": 0.11}}
    text = behind_link.shown(found)
    dense, gtopk, reading = text.splitlines()[1:]
    assert text.startswith("A step, measured behind 100 Mbit/s and 1 ms, and predicted for it:")
    assert dense.split() == ["dense", "measured", "200.0", "ms", "predicted", "190.0", "ms"]
    assert gtopk.split() == ["gtopk", "measured", "100.0", "ms", "predicted", "110.0", "ms"]
    assert "2.00 times as fast there, measured" in reading


def test_without_slow_link_the_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert behind_link.shown(behind_link.measured(2)) == (
        "Not measured behind 100 Mbit/s and 1 ms: `slow_link`, which emulates one, is not installed: "
        "pip install thinwire-cifar[link]"
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "import sys; sys.exit('slow_link: no emulated link here: no TUN')",
            "no emulated link here: no TUN (status 1)",
        ),
        ("raise SystemExit(3)", "nothing was said (status 3)"),
    ],
)
def test_where_there_is_no_link_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, code: str, reason: str) -> None:
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **given: real([sys.executable, "-c", code], **given))
    assert behind_link.shown(behind_link.measured(2)).endswith(f"1 ms: {reason}")
