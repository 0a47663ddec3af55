"""--profile: a trace on which overlap can be seen."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from communicators import SimulatedWorld, as_communicator
from resumed_runs import assert_same_bits, result
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.records.trace import RECORDED, Trace
from thinwire_trainer.run import run
from thinwire_trainer.training.phases import PHASES

pytestmark = pytest.mark.quick


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


def test_a_profiler_that_fails_leaves_the_next_one_its_place(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = torch.profiler.profile.stop

    def starts_not(self: Any) -> None:
        raise RuntimeError("stopped")

    def stops(self: Any) -> None:
        stop(self)  # or torch 2.6 starts no other
        raise RuntimeError("stopped")

    for fails, call in (("start", starts_not), ("stop", stops)):
        given = options(profile=True, output=options().output / fails)
        with monkeypatch.context() as patched:
            patched.setattr(torch.profiler.profile, fails, call)
            with pytest.raises(RuntimeError, match="stopped"):
                run(app, given, as_communicator(None))
        assert not Trace._profiler.locked()


def test_ranks_that_share_a_process_have_one_trace(app: App, options: Callable[..., Options]) -> None:
    """A second profiler in a process ends it."""
    given = options(algorithm="gtopk", profile=True, nworkers=2)
    SimulatedWorld(2).run(lambda comm: run(app, given, comm))
    events = json.loads((given.output / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count("step: forward") >= RECORDED
    assert not torch.autograd.profiler._is_profiler_enabled
