"""--profile on real ranks: exchanges are bars of their own, and what the engine's thread merges is not the loop's."""

from __future__ import annotations

import json

import pytest
from traces import arrows, check_trace


@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_what_goes_on_in_the_background_is_on_the_trace(mpiexec, tmp_path):
    flags = ["--algorithm", "overlap-local-sgd", "--max-epochs", "1", "--profile", "--output", str(tmp_path / "run")]
    done = mpiexec(2, "-m", "cifar", *flags, timeout=150)
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    check_trace(trace)
    assert {(sent["pid"], came["pid"]) for sent, came in arrows(trace)} == {(0, 1), (1, 0)}
    events = [event for event in trace["traceEvents"] if event["pid"] == 0]
    labels = [event for event in events if event.get("cat") == "user_annotation"]
    tracks = {name: {event["tid"] for event in labels if event["name"] == name} for name in ("exchange", "merge")}
    [loop] = {event["tid"] for event in labels if event["name"] == "step: forward"}
    assert tracks["exchange"]
    assert all(str(track).startswith("exchanges ") for track in tracks["exchange"])
    assert tracks["merge"] - {loop}  # in the engine's thread, while the loop computes
