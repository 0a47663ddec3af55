"""Runs in one picture."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.plot import curves_of, main, named, plot_runs, rows_of
from thinwire_trainer.records.metrics import read_metrics


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that are saved."""
    from matplotlib.figure import Figure  # half a second, of whoever collects tests

    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *to, **how: saved.append(self) or save(self, *to, **how))
    return saved


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_runs_are_compared_by_epochs_bytes_and_seconds(
    app: App,
    options: Callable[..., Options],
    tmp_path: Path,
    figures: list[Any],
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    for algorithm in ("dense", "gtopk"):
        train(app, options(algorithm=algorithm, output=tmp_path / algorithm), 2)
    picture = tmp_path / f"both.{kind}"
    assert main([str(tmp_path / "dense"), str(tmp_path / "gtopk"), f"--output={picture}"]) == 0
    assert capsys.readouterr().out.endswith(f"{picture}\n")
    assert picture.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[kind]
    panels = figures[0].axes
    rows = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("dense", "gtopk")}
    assert [panel.get_ylabel() for panel in panels[::3]] == ["training loss", "test loss", "test accuracy"]
    for place, metric in enumerate(["train_loss", "test_loss", "test_accuracy"]):
        for panel in panels[3 * place : 3 * place + 3]:
            drawn = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
            assert drawn == {name: [row[metric] for row in found] for name, found in rows.items()}
    for panel, quantity, unit in ((panels[1], "bytes_sent", 1 << 20), (panels[2], "seconds", 1)):
        line = next(line for line in panel.lines if line.get_label() == "gtopk")
        first, second = (row[quantity] / unit for row in rows["gtopk"])
        assert list(line.get_xdata()) == [first, first + second]


def test_a_metric_that_only_some_have_and_a_loss_that_is_not_finite_are_gaps(tmp_path: Path) -> None:
    row = {"epoch": 1, "train_loss": None, "test_accuracy": 0.5, "seconds": 1.0, "bytes_sent": 0}
    other = {"epoch": 1, "train_loss": 2.0, "perplexity": 9.0, "seconds": 1.0, "bytes_sent": 0}
    for name, content in (("images", row), ("text", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(content) + "\n")
    runs = {name: rows_of(path) for name, path in named([tmp_path / "images", tmp_path / "text"]).items()}
    assert curves_of(runs) == {
        "train_loss": "training loss",
        "test_accuracy": "test accuracy",
        "perplexity": "perplexity",
    }
    assert main([str(tmp_path / "images"), str(tmp_path / "text"), f"--output={tmp_path / 'a.png'}"]) == 0


@pytest.mark.filterwarnings("error")
def test_a_run_that_sent_nothing_has_no_curve_against_bytes(tmp_path: Path, figures: list[Any]) -> None:
    row = {"epoch": 1, "train_loss": 2.0, "seconds": 1.0, "bytes_sent": 0}
    runs = {"two": [row | {"bytes_sent": 1 << 20}] * 2, "alone": [row | {"test_accuracy": 0.5}] * 2}
    plot_runs(runs, tmp_path / "a.png", curves=curves_of(runs))
    drawn = {line.get_label(): list(line.get_xdata()) for line in figures[0].axes[1].lines}
    assert drawn == {"alone": 2 * [pytest.approx(math.nan, nan_ok=True)], "two": [1.0, 2.0]}


def drawn(runs: dict[str, list[dict[str, Any]]], path: Path, figures: list[Any]) -> Any:
    """The figure of these runs."""
    plot_runs(runs, path, curves=curves_of(runs))
    return figures[-1]


EPOCH = {"epoch": 1, "train_loss": 2.0, "seconds": 1.0, "bytes_sent": 1 << 20}


@pytest.mark.filterwarnings("error")
def test_the_legend_has_every_name_as_it_is_and_leaves_the_panels_their_room(
    tmp_path: Path, figures: list[Any]
) -> None:
    names = ["_first", "lr=$0.1$", "momentum_$x", "every setting of a run, " * 9]
    figure = drawn({name: [EPOCH, EPOCH | {"epoch": 2}] for name in names}, tmp_path / "a.png", figures)
    (legend,) = figure.legends
    assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == [*names[:3], names[3].strip()]
    assert not any(text.get_parse_math() for text in legend.get_texts())
    assert all(panel.get_position().width > 0.25 for panel in figure.axes)
    for panel in figure.axes:
        box = panel.xaxis.label.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.width


def test_an_epoch_between_two_gaps_is_seen(tmp_path: Path, figures: list[Any]) -> None:
    rows = [EPOCH | {"epoch": number, "train_loss": None if number != 2 else 1.0} for number in (1, 2, 3)]
    figure = drawn({"skipping": rows}, tmp_path / "a.png", figures)
    assert all(line.get_marker() == "." for panel in figure.axes for line in panel.lines)


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_epochs_are_whole_numbers(tmp_path: Path, figures: list[Any], epochs: int) -> None:
    rows = [EPOCH | {"epoch": epoch} for epoch in range(1, epochs + 1)]
    figure = drawn({"run": rows}, tmp_path / "a.png", figures)
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


def test_many_runs_are_told_apart(tmp_path: Path, figures: list[Any]) -> None:
    figure = drawn({f"run{number}": [EPOCH] for number in range(24)}, tmp_path / "a.png", figures)
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 24


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    assert list(named([tmp_path / "a", tmp_path / "b"])) == ["a", "b"]
    assert list(named([tmp_path / "a" / "run", tmp_path / "b" / "run"])) == ["a/run", "b/run"]
    assert list(named([tmp_path / "a"])) == ["a"]


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (None, [], "cannot be read (No such file or directory): give the --output of a run"),
        ("", [], "has no epoch yet"),
        ("{", [], "it is damaged"),
        ("[1]\n", [], "holds other things than epochs"),
        ('{"epoch": 1}\n', [], "holds other things than epochs"),
        ("[" * 100_000, [], "it is damaged"),
        ('{"seconds": 1.0, "train_loss": 1.0, "epoch": 1, "bytes_sent": 1}\n', [], "holds other things than epochs"),
        (f'{{"epoch": 1, "train_loss": 1.0, "seconds": 1.0, "bytes_sent": {10**400}}}\n', [], "other things than"),
        ('{"epoch": "x", "train_loss": 1.0, "seconds": 1.0, "bytes_sent": 1}\n', [], "other things than epochs"),
        ("", ["--output=picture.gif"], "is to end in .png, .svg, .pdf"),
        ("", ["--output=nowhere/p.png"], "--output nowhere/p.png: there is no folder nowhere: make it"),
        ("", ["{run}"], "a run is given twice"),
    ],
)
def test_what_is_no_run_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, flags: list[str], says: str
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path), *(flag.format(run=tmp_path) for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
