"""The demo's figures: from metrics to table, and the prediction."""

import pytest
import torch
from rich.console import Console
from thinwire_cifar import demo
from thinwire_cifar.comparison import (
    GIGABIT,
    Prediction,
    Summary,
    exchange_seconds,
    reading,
    show,
    summarise,
)
from thinwire_trainer.launching.placement import LAUNCHERS
from thinwire_trainer.records.metrics import Row

pytestmark = pytest.mark.quick

NUMEL, DENSITY = 10_000, 0.01


def test_figures_are_per_step() -> None:
    rows: list[Row] = [
        {
            "steps": 10 * epoch,
            "test_accuracy": 0.9,
            "bytes_sent": 500,
            "compute_seconds": 2.0,
            "communication_seconds": 1.0,
            "selection_seconds": 0.5,
        }
        for epoch in (1, 2)
    ]
    summary = summarise(rows, images=360)
    assert summary == Summary(accuracy=0.9, images=360, nbytes=50, compute=0.2, communication=0.1, selection=0.05)
    assert summary.step == pytest.approx(0.3)


def test_the_table_shows_measured_and_predicted_apart() -> None:
    summaries = {
        "dense": Summary(accuracy=0.99, images=360, nbytes=1_000_000, compute=0.01, communication=0.001),
        "gtopk": Summary(accuracy=0.98, images=360, nbytes=10_000, compute=0.01, communication=0.003),
    }
    predictions = {
        "dense": Prediction(compute=0.01, selection=0, exchange=0.02),
        "gtopk": Prediction(compute=0.01, selection=0.004, exchange=0.001),
    }
    console = Console(width=200)
    with console.capture() as shown:
        show(summaries, predictions, ranks=4, console=console)
    text = shown.get()
    for expected in (
        "99.0 ± 0.6 %",
        "98.0 ± 0.8 %",
        "10,000",
        "13.0 ms",
        "15.0 ms",
        "3.0 times as long",
        "100 times fewer",
        "2.00 times as fast",
    ):
        assert expected in text
    assert text.index("measured") < text.index("predicted")


@pytest.mark.parametrize(
    ("dense", "sparse", "said"),
    [
        (0.990, 0.985, "gtopk is 0.5 points below dense, within ± 0.9,"),
        (0.985, 0.990, "gtopk is 0.5 points above dense, within ± 0.9,"),
        (0.992, 0.972, "gtopk is 2.0 points below dense, more than ± 1.1,"),
        (1.0, 1.0, "gtopk is 0.0 points above dense, within ± 0.4,"),
        (351 / 360, 346 / 360, "gtopk is 1.4 points below dense, within ± 1.4"),  # not "1.4, more than ± 1.4"
    ],
)
def test_the_reading_says_whether_accuracies_differ_by_more_than_chance(dense: float, sparse: float, said: str) -> None:
    runs = {"dense": dense, "gtopk": sparse}
    measured = {"nbytes": 1.0, "compute": 0.01, "communication": 0.001}
    summaries = {name: Summary(accuracy=accuracy, images=360, **measured) for name, accuracy in runs.items()}
    prediction = Prediction(compute=0.01, selection=0, exchange=0.02)
    text = reading(summaries, dict.fromkeys(runs, prediction))
    assert text.startswith(said)
    assert "360 test images" in text


def test_the_uncertainty_is_that_of_drawing_so_many_images() -> None:
    """Of 2,000 tests with 360 images each that a model gets right by 98 %."""
    rights = torch.distributions.Binomial(360, torch.tensor(0.98))
    torch.manual_seed(0)
    spread = (rights.sample(torch.Size([2000])) / 360).std().item()
    summary = Summary(accuracy=0.98, images=360, nbytes=1, compute=1, communication=1)
    assert summary.uncertainty == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_predictions_follow_the_link_model(size: int) -> None:
    def seconds(algorithm: str) -> float:
        return exchange_seconds(algorithm, numel=NUMEL, density=DENSITY, size=size, link=GIGABIT)

    rounds = size.bit_length() - 1
    dense = 2 * rounds * GIGABIT.alpha + GIGABIT.beta * 4 * 2 * NUMEL * (size - 1) / size
    gtopk = rounds * (GIGABIT.alpha + GIGABIT.beta * 8 * NUMEL * DENSITY)
    # Headers are the rest.
    assert seconds("dense") == pytest.approx(dense, rel=0.01)
    assert seconds("gtopk") == pytest.approx(gtopk, rel=0.01)


@pytest.mark.parametrize(("given", "environment"), [(["--nworkers=1"], {}), ([], {"PMI_RANK": "0", "PMI_SIZE": "1"})])
def test_a_demo_of_one_worker_is_refused_before_it_trains(
    given: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variables in LAUNCHERS.values():
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "_work", lambda *given: None)
    assert demo.main(given) == 2
    assert "give --nworkers 2 or more" in capsys.readouterr().err


def test_a_seed_that_no_generator_takes_is_refused_before_workers_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([f"--seed={1 << 64}"])
    assert "expected a whole number from 0 to 2**64 - 1" in capsys.readouterr().err
