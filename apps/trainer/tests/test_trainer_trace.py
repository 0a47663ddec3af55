"""--profile: a trace on which overlap can be seen."""

import json
from collections.abc import Callable
from typing import Any

import torch
from communicators import as_communicator
from resumed_runs import assert_same_bits, result
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.records.trace import RECORDED, on_tracks
from thinwire_trainer.run import run
from thinwire_trainer.training.phases import PHASES


def test_the_trace_has_every_phase_of_the_recorded_steps_and_changes_nothing(
    app: App, options: Callable[..., Options]
) -> None:
    plain = options(algorithm="gtopk", output=options().output / "plain")
    run(app, plain, as_communicator(None))
    given = options(algorithm="gtopk", profile=True)
    run(app, given, as_communicator(None))
    assert_same_bits(result(given), result(plain))
    events = json.loads((given.output / "trace.json").read_text())["traceEvents"]
    labels = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for phase in set(PHASES) - {"selection"}:
        assert labels.count(f"step: {phase}") == RECORDED * (2 if phase in ("update", "exchange") else 1)
    assert labels.count("select") == labels.count("restore") == RECORDED
    assert sorted(path.name for path in given.output.glob("trace*")) == ["trace.json"]


def test_a_run_that_is_shorter_than_the_trace_has_a_short_one(app: App, options: Callable[..., Options]) -> None:
    given = options(profile=True, batch_size=8, max_epochs=1)
    run(app, given, as_communicator(None))
    events = json.loads((given.output / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count("step: forward") == 1
    assert not torch.autograd.profiler._is_profiler_enabled


def bar(ts: int, dur: int, name: str = "exchange") -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 7}


def test_exchanges_that_overlap_are_on_tracks_of_their_own() -> None:
    events = on_tracks([bar(20, 5), bar(0, 10), bar(5, 10), bar(0, 30, "step: forward"), bar(12, 3)])
    tracks = {event["ts"]: event["tid"] for event in events if event["name"] == "exchange"}
    assert tracks == {0: "exchanges 0", 5: "exchanges 1", 12: "exchanges 0", 20: "exchanges 0"}
    assert [event["tid"] for event in events if event["name"] == "step: forward"] == [7]
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {"exchanges 0", "exchanges 1"}
