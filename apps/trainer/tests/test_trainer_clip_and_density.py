"""--clip-norm and --density-warmup: what the exchange does with them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.records.metrics import read_metrics


@pytest.mark.parametrize("warm_up", ["2", "dgc:2"])
def test_a_density_warm_up_ends_in_the_same_bits_when_it_is_resumed(
    app: App, options: Callable[..., Options], tmp_path: Path, warm_up: str
) -> None:
    straight = options(algorithm="gtopk", density=0.1, density_warmup=warm_up, output=tmp_path / "straight")
    train(app, straight, 2)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    assert killed_after(12, app, broken, 2)
    train(app, replace(broken, resume="latest"), 2)
    assert_same_bits(result(broken), result(straight))


def test_the_first_steps_send_more(app: App, options: Callable[..., Options], tmp_path: Path) -> None:
    sent = []
    for steps in (0, 1, 2):
        given = options(
            algorithm="gtopk", density=0.1, density_warmup=steps, max_epochs=1, output=tmp_path / f"{steps}"
        )
        train(app, given, 2)
        sent.append(read_metrics(given.output / "metrics.jsonl")[0]["bytes_sent"])
    none, one, two = map(int, map(str, sent))
    assert two - one == one - none > 0


@pytest.mark.parametrize(("algorithm", "factor"), [("eager-majority", 2**0.5), ("local-sgd", 1.0)])
def test_a_rank_s_part_of_a_mean_may_be_longer_than_its_own_step(
    app: App,
    options: Callable[..., Options],
    tmp_path: Path,
    algorithm: str,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """√P times as long, eager ranks' too: the mean over P is then as long as a synchronous one."""
    limits = set()
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: limits.add(limit) or clip(parameters, limit)
    )
    train(app, options(algorithm=algorithm, clip_norm=0.5, max_epochs=1, output=tmp_path / "run"), 2)
    assert limits == {0.5 * factor}


@pytest.mark.few(4)
@pytest.mark.parametrize("algorithm", ["dense", "gtopk", "powersgd", "local-sgd", "eager-majority"])
def test_clipping_shortens_what_a_run_learns(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    """Also with --overlap, where gradients are exchanged."""
    losses = {}
    for clip in (1e-6, 1e6):
        overlaps = {"overlap": True} if algorithm in ("dense", "gtopk", "powersgd") else {}
        given = options(algorithm=algorithm, clip_norm=clip, output=tmp_path / f"{clip}", **overlaps)
        train(app, given, 2)
        losses[clip] = float(str(read_metrics(given.output / "metrics.jsonl")[-1]["train_loss"]))
    assert losses[1e-6] > losses[1e6] + 0.1
