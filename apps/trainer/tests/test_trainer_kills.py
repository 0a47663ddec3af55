"""Law 7 in a chain: killed three times, each time somewhere else and gone on with, a run ends in the same bits.

What dies here is all ranks at once, in the midst of a write: a kill between two writes leaves what the earlier left.
`python -m bench kills` does it to real processes.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from resumed_runs import assert_same_bits, killed_after, result, train
from thinwire_trainer.app import App
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.records.run_folder import RunFolder

CHAINS: dict[str, dict[str, object]] = {
    "dense": {},
    "gtopk": {},
    "spardl": {"teams": 2, "nworkers": 4},
    "local-sgd": {"sync_every": 3},
    "overlap-local-sgd": {"sync_every": 2},
}
KILLS, RANKS, STEPS = 3, 4, 15
LONGEST = 40  # operations on the disk; a step's checkpoint takes about 14


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", CHAINS)
def test_a_run_that_is_killed_three_times_ends_in_the_same_bits(
    app: App, options: Callable[..., Options], tmp_path: Path, algorithm: str
) -> None:
    flags = {"batch_size": 2, "max_epochs": STEPS // 3, "momentum": 0.9, **CHAINS[algorithm]}
    straight = options(algorithm=algorithm, output=tmp_path / "straight", **flags)
    train(app, straight, RANKS)
    broken = replace(straight, output=tmp_path / "broken", checkpoint_every=1)
    folder, chance, reached = RunFolder(broken.output), random.Random(algorithm), []
    for _ in range(KILLS):
        begun = folder.config.exists()
        again = replace(broken, resume="latest" if begun else None)
        assert killed_after(chance.randint(15, LONGEST), app, again, RANKS)
        reached.append(folder.checkpoints.complete()[-1].name)
    assert reached == sorted(set(reached)), "every kill comes later than the one before"
    train(app, replace(broken, resume="latest"), RANKS)
    assert_same_bits(result(broken), result(straight))
