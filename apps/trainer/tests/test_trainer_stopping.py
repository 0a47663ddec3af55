"""A signal on any rank: all ranks stop at the same step, with a checkpoint, from which the run goes on."""

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from communicators import CollectiveError, Communicator, SimulatedWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from partial_collectives import EagerSGD
from resumed_runs import assert_same_bits, result, train
from thinwire_trainer.agreement import LONGEST, AgreedStop
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import Stopped
from thinwire_trainer.launching import ending
from thinwire_trainer.launching.ending import StopRequest, exit_code
from thinwire_trainer.launching.placement import Placement
from thinwire_trainer.records.run_folder import RunFolder
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.table import TABLE
from thinwire_trainer.training import loop


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(1, 5),
    seconds=st.lists(st.floats(0.001, 3.0), min_size=1, max_size=5),
    told=st.integers(0, 200),
    who=st.integers(0, 4),
    number=st.sampled_from([signal.SIGTERM, signal.SIGINT]),
    first=st.integers(0, 50),
)
def test_all_ranks_stop_at_one_step_soon_after_any_was_told(
    ranks: int, seconds: list[float], told: int, who: int, number: int, first: int
) -> None:
    """Ranks that take different times for a step, by clocks of their own."""

    def body(comm: Communicator) -> tuple[int, int, float]:
        now, step, asked = 0.0, first, first + told
        stop = AgreedStop(
            comm,
            lambda: number if comm.rank == who % ranks and step >= asked else 0,
            first_step=first,
            clock=lambda: now,
        )
        late = 0.0
        while True:
            step += 1
            now += (taken := seconds[comm.rank % len(seconds)])
            late += taken if step > asked else 0.0
            if stopped_by := stop.after(step):
                return step, stopped_by, late

    outcomes = SimulatedWorld(ranks).run(body)
    assert len({(step, stopped_by) for step, stopped_by, _ in outcomes}) == 1
    assert outcomes[0][1] == number
    assert outcomes[0][0] > first + told
    slowest = max(seconds[rank % len(seconds)] for rank in range(ranks))
    assert max(late for _, _, late in outcomes) <= 2 * max(ranks * 1.0, slowest) + 2 * slowest


def test_the_first_steps_may_take_no_time_at_all() -> None:
    def body(comm: Communicator) -> int:
        stop = AgreedStop(comm, lambda: 0, first_step=0, clock=lambda: 0.0)
        assert not any(stop.after(step) for step in range(1, 3 * LONGEST))
        stop.close()
        return comm.messages_sent

    assert SimulatedWorld(2).run(body)[0] < 20


@pytest.mark.parametrize("quorum", ["majority", "solo", 2])
def test_ranks_by_rounds_meet_before_they_decide(quorum: str) -> None:
    """Else the first one waits for the last one's sum, and that for a round which the first one has to begin."""

    def body(comm: Communicator) -> tuple[int, float]:
        w = torch.nn.Parameter(torch.zeros(1))
        told = {"first_step": 0, "clock": comm.clock}
        with EagerSGD(torch.optim.SGD([w], lr=0.1), [("w", w)], comm=comm, quorum=quorum) as optimizer:
            stop = AgreedStop(
                comm, lambda: signal.SIGTERM * (comm.rank == 1 and step > 25), meet=optimizer.synchronize, **told
            )
            for step in range(1, 400):
                comm.elapse(0.2 if comm.rank == 1 else 0.01)
                w.grad = torch.ones(1)
                optimizer.step()
                if stop.after(step):
                    return step, w.item()
        raise AssertionError("it was told to stop")

    outcomes = SimulatedWorld(3).run(body)
    assert len(set(outcomes)) == 1


def stopped_at(told: int, app: App, options: Options, ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Train until the last rank is told to stop, after so many steps; at which step it did, 0 if it ended before."""
    real = loop.train_step

    def train_step(training: loop.Training, read: Iterator[Any], *, samples: int) -> float:
        if training.comm.rank == ranks - 1 and training.steps == told:
            requests[training.comm.rank].takes(signal.SIGTERM)
        return real(training, read, samples=samples)

    requests = [StopRequest() for _ in range(ranks)]
    steps: list[tuple[int, int]] = []

    def body(comm: Communicator) -> None:
        try:
            run(app, options, comm, request=requests[comm.rank])
        except Stopped as stopped:
            steps.append((stopped.number, int(str(stopped).split()[5].rstrip(","))))

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        SimulatedWorld(ranks, own_generators=True).run(body)
    assert len(steps) in (0, ranks)
    assert len({*steps}) <= 1
    assert all(number == signal.SIGTERM for number, _ in steps)
    return steps[0][1] if steps else 0


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [name for name in TABLE if not name.startswith("eager-")])  # these: see below
def test_a_stopped_run_goes_on_with_the_same_bits(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire_trainer.agreement.BETWEEN", 1e-9)  # at every step
    straight = options(algorithm=algorithm, output=tmp_path / "straight", momentum=0.9, max_epochs=3)
    train(app, straight, 2)
    for told, every in ((1, None), (0, 1)):
        broken = replace(straight, output=tmp_path / f"broken{told}", checkpoint_every=every)
        step = stopped_at(told, app, broken, 2, monkeypatch)
        assert step > told
        assert RunFolder(broken.output).checkpoints.complete()[-1].name == f"{step:08d}"
        train(app, replace(broken, resume="latest"), 2)
        assert_same_bits(result(broken), result(straight))


@pytest.mark.parametrize("algorithm", [name for name in TABLE if name.startswith("eager-")])
def test_a_stopped_eager_run_goes_on(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the end; a checkpoint is a meeting of all ranks, so that a run which has more of them has other bits."""
    monkeypatch.setattr("thinwire_trainer.agreement.BETWEEN", 1e-9)
    broken = options(algorithm=algorithm, output=tmp_path / "broken", momentum=0.9, max_epochs=3)
    step = stopped_at(1, app, broken, 2, monkeypatch)
    assert step > 1
    assert RunFolder(broken.output).checkpoints.complete()[-1].name == f"{step:08d}"
    train(app, replace(broken, resume="latest"), 2)
    assert (broken.output / "metrics.jsonl").read_text().count("\n") == 3


def test_at_the_end_of_an_epoch_it_is_evaluated_first_and_a_run_that_has_ended_has_ended(
    app: App, options: Callable[..., Options], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire_trainer.agreement.BETWEEN", 1e-9)
    straight = options(output=tmp_path / "straight")
    train(app, straight, 2)
    steps = set()
    for told in range(6):
        broken = replace(straight, output=tmp_path / f"broken{told}")
        step = stopped_at(told, app, broken, 2, monkeypatch)
        steps.add(step)
        if step:
            rows = (broken.output / "metrics.jsonl").read_text() if step >= 3 else ""
            assert rows.count("\n") == step // 3
            train(app, replace(broken, resume="latest"), 2)
        assert_same_bits(result(broken), result(straight))
    assert steps >= {0, 3}


def test_nobody_is_asked_where_signals_end_the_process_at_once(
    app: App, options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(AgreedStop, "after", lambda stop, step: asked.append(step))
    train(app, options(), 2)
    never, request = options(checkpoint_every=0, overwrite=True), StopRequest()
    SimulatedWorld(2).run(lambda comm: run(app, never, comm, request=request))
    assert asked == []
    once = options(checkpoint_every=1, overwrite=True, max_epochs=1)
    SimulatedWorld(2).run(lambda comm: run(app, once, comm, request=request))
    assert asked == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Stopped(15, 7), 143, "points: error: stopped by SIGTERM after step 7, with a checkpoint: --resume goes on\n"),
        (Stopped(2, 7), 130, "points: error: stopped by SIGINT after step 7, with a checkpoint: --resume goes on\n"),
        (CollectiveError("rank 1 left"), 1, "points: error: rank 1 left\n"),
    ],
)
def test_the_exit_code_is_the_signals(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, says: str
) -> None:
    def work() -> None:
        raise error

    assert exit_code(work, Placement(), program="points") == code
    assert capsys.readouterr().err == says


def test_an_exit_amid_the_run_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: sys.exit(0), Placement(), program="points") == 1
    assert capsys.readouterr().err.startswith("points: error: sys.exit(0) was called during the run")


def test_only_a_first_signal_is_left_to_the_run_and_only_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 100.0, 100.001, 100.002, 100.3, 200.0])
    monkeypatch.setattr(ending, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    early = StopRequest()
    assert not early.takes(signal.SIGTERM)
    request = StopRequest()
    with request.deferred():
        assert request.takes(signal.SIGINT)
        assert request.takes(signal.SIGINT)  # the same one, sent to the process and to its group
        assert not request.takes(signal.SIGTERM)
        assert not request.takes(signal.SIGINT)
    assert request.number == signal.SIGINT
    ended = StopRequest()
    with ended.deferred():
        pass
    assert not ended.takes(signal.SIGTERM)
