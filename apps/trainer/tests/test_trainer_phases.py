"""Where a step's time goes, by a clock that counts how often it is read."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from communicators import as_communicator
from data_parallel.schemes.sparse import SparseLane
from resumed_runs import train
from thinwire_trainer import run as run_module
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.records.metrics import read_metrics
from thinwire_trainer.training.phases import PHASES, DeviceStopwatch, HostStopwatch, Phases, stopwatch_of


def counting() -> Phases:
    return Phases(HostStopwatch(map(float, count()).__next__))


def test_phases_follow_one_another_without_a_gap() -> None:
    phases = counting()
    for name in ("update", "data", "forward", "backward", "exchange", "update", "exchange"):
        phases.enter(name)
    assert phases.end() == dict.fromkeys(PHASES, 1.0) | {"update": 2.0, "exchange": 2.0, "selection": 0.0}
    phases.enter("data")
    assert sum(phases.end().values()) == 1.0  # nothing of the step before


def test_the_forward_begins_where_the_model_is_called_first() -> None:
    model, phases = torch.nn.Linear(2, 2), counting()
    with phases.forward_of(model):
        for calls in (1, 3, 0):
            phases.enter("data")
            for _ in range(calls):
                model(torch.zeros(1, 2))
            phases.enter("backward")
            model(torch.zeros(1, 2))  # such as a checkpointed activation
            seconds = phases.end()
            assert (seconds["data"], seconds["forward"], seconds["backward"]) == (1.0, float(calls > 0), 1.0)
    phases.enter("data")
    model(torch.zeros(1, 2))
    assert phases.end()["forward"] == 0.0


@pytest.mark.parametrize("algorithm", ["dense", "gtopk", "overlap-local-sgd"])
def test_phases_evaluation_and_rest_are_the_seconds_of_an_epoch(
    app: App, options: Callable[..., Options], algorithm: str
) -> None:
    given = options(algorithm=algorithm)
    train(app, given, 2)
    for row in read_metrics(given.output / "metrics.jsonl"):
        seconds = {name: row[f"{name}_seconds"] for name in (*PHASES, "evaluation", "rest")}
        assert sum(seconds.values()) == pytest.approx(row["seconds"])
        assert min(seconds.values()) > -1e-9
        assert seconds["selection"] + seconds["exchange"] == pytest.approx(row["communication_seconds"])
        computed = sum(seconds[name] for name in ("data", "forward", "backward", "update"))
        assert computed == pytest.approx(row["compute_seconds"])


def test_what_selecting_takes_is_told_from_the_exchange(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clocks stand still, but for 3 s at each selection."""
    now, real = [0.0], SparseLane.send

    def slow(self: SparseLane, *given: object) -> object:
        now[0] += 3.0
        return real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(SparseLane, "send", slow)
    monkeypatch.setattr(run_module, "stopwatch_of", lambda device: HostStopwatch(lambda: now[0]))
    monkeypatch.setattr(run_module, "clock_of", lambda device: lambda: now[0])
    alone = as_communicator(None)
    monkeypatch.setattr(type(alone), "clock", lambda self: now[0])
    given = options(algorithm="gtopk")
    run_module.run(app, given, alone)
    for row in read_metrics(given.output / "metrics.jsonl"):
        assert (row["selection_seconds"], row["exchange_seconds"], row["rest_seconds"]) == (18.0, 0.0, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_devices_time_counts_not_when_kernels_are_queued() -> None:
    stopwatch = stopwatch_of(torch.device("cuda"))
    assert isinstance(stopwatch, DeviceStopwatch)
    factor = torch.rand(4096, 4096, device="cuda")
    for _ in range(2):  # the first time loads libraries
        stopwatch.mark()
        stopwatch.mark()
        for _ in range(50):
            factor @ factor
        stopwatch.mark()
        nothing, work = stopwatch.intervals()
    assert 0 <= nothing < work / 10
