"""The command line: published flags, and one clear message for each wrong one."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from communicators import as_communicator
from data_parallel import DistributedOptimizer
from data_parallel.schemes.table import COMPRESSORS
from sparse_collectives import ALGORITHMS
from sparse_collectives import DENSE_WIRES as KNOWN_DENSE_WIRES
from sparse_collectives import WIRES as KNOWN_WIRES
from sparse_compress import DGCTopK, GaussianK, RandomK, Threshold, TopK
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flag import Flag
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.errors import AgreedError, RunError
from thinwire_trainer.run import run
from thinwire_trainer.synchronisers.periodic import MAKERS
from thinwire_trainer.synchronisers.table import DENSE_WIRE, TABLE, WIRE, Synchronisation

pytestmark = pytest.mark.quick


def test_the_published_command(app: App) -> None:
    flags = "--dnn plain --dataset points --compression --compressor gtopk --density 0.001 --batch-size 32 --lr 0.1"
    options = parse([*flags.split(), "--max-epochs", "140", "--nworkers", "4", "--data-dir", "D"], app, world_size=4)
    assert (options.algorithm, options.own["density"], options.nworkers) == ("gtopk", 0.001, 4)
    assert (options.data_dir, options.output) == (Path("D"), Path("runs/points-plain-points-gtopk"))


@pytest.mark.parametrize(
    ("flags", "algorithm"),
    [
        ("", "dense"),
        ("--algorithm gtopk", "gtopk"),
        ("--compression", "gtopk"),
        ("--compression --compressor topk", "topk-allgather"),
        ("--compression --compressor topkA --algorithm topk-allgather", "topk-allgather"),
        ("--compression --compressor none", "dense"),
        ("--compression --compressor topkDSA", "topk-dsa"),
        ("--compression --compressor oktopk", "oktopk"),
        ("--compression --compressor spardl", "spardl"),
        ("--algorithm powersgd", "powersgd"),
        ("--algorithm dense-int8", "dense-int8"),
    ],
)
def test_two_spellings_of_the_algorithm(app: App, flags: str, algorithm: str) -> None:
    assert parse(flags.split(), app, world_size=None).algorithm == algorithm


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--dnn vgg", "'plain', 'dropout'"),
        ("--density 0", "expected 0 < density <= 1"),
        (
            "--density 0.1",
            "topk-dsa, gtopk, oktopk, spardl, sparseloco, auto; dense has no density",
        ),
        ("--algorithm powersgd --density 0.01", "powersgd has no density"),
        ("--algorithm dense-int8 --wire bf16", "dense-int8 has no wire"),
        ("--algorithm gtopk --rank 2", "--rank 2 is for powersgd; gtopk has no rank"),
        ("--algorithm powersgd --rank 0", "expected a whole number from 1 on"),
        ("--algorithm powersgd --dense-steps -1", "expected a whole number from 0 on"),
        ("--algorithm gtopk --dense-steps 2", "--dense-steps 2 is for powersgd; gtopk has no dense steps"),
        ("--compression --compressor topk-allgather", "choose from 'none', 'topk', 'topkA'"),
        ("--density 1.5", "given '1.5'"),
        ("--density much", "given 'much'"),
        ("--batch-size 0", "expected a whole number from 1 on"),
        ("--batch-size 2.5", "given '2.5'"),
        ("--lr nan", "expected a number above 0"),
        ("--momentum 1", "expected 0 <= momentum < 1"),
        ("--weight-decay -1", "expected a number from 0 on"),
        ("--max-epochs -3", "--max-epochs"),
        ("--compressor gtopk", "--compression"),
        ("--algorithm gtopk --teams 1", "--teams 1 is for spardl"),
        ("--algorithm gtopk --teams 2", "--teams 2 is for spardl; gtopk has no teams"),
        ("--algorithm spardl --teams 3", "--teams 3 does not divide the 4 workers"),
        ("--algorithm eager-quorum --quorum 5", "--quorum 5 is more than the 4 workers"),
        ("--algorithm eager-quorum --quorum 0", "expected a whole number from 1 on"),
        ("--algorithm eager-solo --quorum 2", "--quorum 2 is for eager-quorum; eager-solo has no quorum"),
        ("--algorithm eager-solo --grace soon", "given 'soon', expected a number from 0 on"),
        ("--algorithm eager-solo --max-staleness -1", "expected a whole number from 0 on"),
        ("--algorithm gtopk --wire fp8", "'fp32', 'bf16'"),
        ("--algorithm dense --wire int8", "is not for dense, which takes fp32, bf16, fp16"),
        ("--compression --compressor topk --algorithm gtopk", "differ"),
        ("--resume --overwrite", "give one of them"),
        ("--residuals carry", "--residuals carry is for --resume with another number of ranks"),
        ("--resume --residuals keep", "'carry', 'drop'"),
        ("--resume yesterday", "'latest', 'previous'"),
        ("--nworkers 3", "the launcher started 4"),
        ("--dens 0.1", "unrecognized"),
        ("--algorithm gtopk --nesterov", "gtopk has its own before the selection"),
        ("--algorithm local-sgd --overlap", "--overlap is for gradients that are exchanged, and local-sgd has none"),
        ("--algorithm gtopk --density-warmup dgc:x", "given 'x', expected a whole number from 0 on"),
        ("--nesterov --momentum 0", "no effect with --momentum 0"),
        ("--milestones 3 2", "ascending"),
        ("--milestones 0", "expected a whole number from 1 on"),
        ("--milestones 2 --lr-schedule cosine", "--milestones are those of --lr-schedule step, not cosine"),
        ("--label-smoothing 1", "expected 0 <= smoothing < 1"),
        (
            "--algorithm spardl --select dgc",
            "--select dgc is for topk-allgather, topk-dsa, gtopk; spardl has no select",
        ),
        ("--algorithm gtopk --select threshold", "give it with --threshold"),
        ("--algorithm gtopk --threshold 0.1", "has no effect on --select topk"),
        ("--algorithm gtopk --select most", "'topk', 'dgc'"),
        ("--keep 0", "expected a whole number from 1 on"),
        ("--keep 3 --checkpoint-every 0", "--keep 3 has no effect with --checkpoint-every 0"),
        ("--device cpu --backend nccl", "--backend nccl is for GPUs"),
        ("--seed 18446744073709551616", "expected a whole number from 0 to 2**64 - 1"),
        ("--warmup-epochs 9 --max-epochs 2", "--warmup-epochs 9 with --max-epochs 2 would never reach --lr 0.1"),
        ("--warmup-epochs 20", "--warmup-epochs 20 with --max-epochs 20 would never reach"),
        ("--device tpu", "'auto', 'cpu', 'cuda'"),
    ],
)
def test_a_wrong_flag_is_named_with_what_was_expected(app: App, flags: str, says: str) -> None:
    with pytest.raises(RunError) as refusal:
        parse(flags.split(), app, world_size=4)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_tensorboard_is_asked_for_only_where_it_is(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire_trainer.command_line.flags.find_spec", lambda name: None)
    with pytest.raises(RunError, match="pip install tensorboard"):
        parse(["--tensorboard"], app, world_size=None)
    monkeypatch.setattr("thinwire_trainer.command_line.flags.find_spec", lambda name: name)
    assert parse(["--tensorboard"], app, world_size=None).tensorboard


def test_every_algorithm_can_be_trained_with() -> None:
    eager = ["eager-solo", "eager-majority", "eager-quorum"]
    assert sorted([*ALGORITHMS, *COMPRESSORS, *MAKERS, *eager]) == sorted(TABLE)
    assert tuple(KNOWN_WIRES) == WIRE.choices
    assert tuple(KNOWN_DENSE_WIRES) == DENSE_WIRE.choices


@pytest.mark.parametrize("algorithm", TABLE)
def test_absent_flags_are_absent(app: App, algorithm: str) -> None:
    options = parse(["--algorithm", algorithm], app, world_size=None)
    own = {flag.name for flag in TABLE[algorithm].flags}
    assert set(options.own) == own
    others = {flag.name for entry in TABLE.values() for flag in entry.flags} - own
    assert not others & (set(options.settings()) | set(options.flags()) | set(options.alike()))
    assert ("density" in options.settings()) == ("density" in own)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--label-smoothing 0.1", "--label-smoothing 0.1"),
        ("--download", "--download"),
        ("--amp", "--amp"),
        ("--clip-norm 2", "--clip-norm 2.0"),
        ("--dnn dropout", "--dnn dropout"),
        ("--milestones 2 4", "--milestones 2 4"),
        ("--verify 3", "--verify 3"),
        ("--readers 0", "--readers 0"),
    ],
)
def test_a_flag_is_for_apps_that_have_a_use_for_it(app: App, words: str, shown: str) -> None:
    argv = words.split()
    name = argv[0][2:].replace("-", "_")
    without = replace(app, ignores=frozenset({name}))
    assert parse(argv, app, world_size=None) != parse([], app, world_size=None)
    assert parse([], without, world_size=None) == parse([], app, world_size=None)
    with pytest.raises(RunError, match=f"{shown} has no effect on points: leave it out"):
        parse(argv, without, world_size=None)


def test_help_shows_what_all_runs_take_before_what_some_take(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], app, world_size=None)
    headings = re.findall(r"^([^\s:][^:\n]*):$", capsys.readouterr().out, flags=re.MULTILINE)
    common = ["options", "task", "synchronisation", "optimisation", "machine", "run"]
    assert headings[: len(common)] == common
    assert all(heading.startswith("only with") for heading in headings[len(common) :])


def test_an_apps_default_is_for_the_algorithms_that_take_it(app: App) -> None:
    dense = replace(app, defaults={"density": 0.5, "lr": 0.3})
    assert parse(["--algorithm", "gtopk"], dense, world_size=None).own["density"] == 0.5
    options = parse([], dense, world_size=None)
    assert (options.lr, "density" in options.own) == (0.3, False)


def test_a_synchronisation_of_ones_own_is_one_entry(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    every = Flag(name="pause", default=4, read=int, says="steps between averages")
    entry = Synchronisation(make=unused, flags=(every,), needs="not-installed-anywhere")
    with_it = replace(app, synchronisations={"periodic": entry})
    with pytest.raises(RunError, match="periodic needs the not-installed-anywhere package: pip install not-i"):
        parse(["--algorithm", "periodic"], with_it, world_size=None)
    with pytest.raises(RunError, match="--pause 3 is for periodic; dense has no pause"):
        parse(["--pause", "3"], with_it, world_size=None)
    here = replace(app, synchronisations={"periodic": replace(entry, needs="")})
    assert parse(["--algorithm", "periodic"], here, world_size=None).own == {"pause": 4}
    with pytest.raises(RunError, match="is for topk-allgather"):
        parse(["--algorithm", "periodic", "--density", "0.1"], here, world_size=None)
    with pytest.raises(SystemExit):
        parse(["--help"], here, world_size=None)
    assert "only with --algorithm periodic:\n  --pause" in capsys.readouterr().out


def unused(*given: object) -> NoReturn:
    raise AssertionError("flags are checked without it")


def test_flags_are_checked_before_anything_heavy_is_imported() -> None:
    program = "import sys, thinwire_trainer.command; sys.exit(bool({'torch', 'numpy', 'mpi4py'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_settings_leave_out_what_shapes_no_number(app: App) -> None:
    def settings(flags: str) -> object:
        return parse(flags.split(), app, world_size=None).settings()

    assert settings("") == settings("--output elsewhere --resume --checkpoint-every 5 --data-dir D")
    assert settings("") != settings("--lr 0.2")
    assert settings("--max-epochs 3") != settings("--max-epochs 4")
    constant = "--lr-schedule constant --max-epochs"
    assert settings(f"{constant} 3") == settings(f"{constant} 4")


@pytest.mark.parametrize("algorithm", MAKERS)
def test_own_flags_reach_a_periodic_optimizer(app: App, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"sync_every": 7, "alpha": 0.25, "beta": 0.1, "block_rate": 0.9, "outer_rate": 0.3, "outer_momentum": 0.2}
    changed |= {
        "block_momentum": 0.6,
        "compress": "int8",
        "fragments": 2,
        "delay": 3,
        "density": 0.1,
        "decay": 0.5,
        "topk": 8,
        "chunk": 16,
        "verify": 3,
    }
    own = {flag.name: changed[flag.name] for flag in TABLE[algorithm].flags}
    asked: list[dict[str, Any]] = []
    real = MAKERS[algorithm]
    monkeypatch.setitem(MAKERS, algorithm, lambda *given, **named: asked.append(named) or real(*given, **named))
    argv = [text for name, value in own.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    options = parse(["--algorithm", algorithm, *argv], app, world_size=None)
    made = TABLE[algorithm].make(options, torch.nn.Linear(9, 7), as_communicator(None), steady)
    [named] = asked
    if outer := named.pop("outer", None):
        named |= {f"outer_{name}": outer.keywords[rate] for name, rate in (("rate", "lr"), ("momentum", "momentum"))}
    if "block_momentum" in own:
        named["block_momentum"] = named["momentum"]
    assert {name: named[name] for name in own} == own
    assert made.optimizer.param_groups[0]["momentum"] == options.momentum


def test_demo_has_defaults_of_its_own_and_the_weight_decay_in_its_own_step(app: App) -> None:
    argv = ["--algorithm", "demo", "--weight-decay", "0.1"]
    default, given = (
        parse([*argv, *more], app, world_size=None) for more in ([], ["--lr", "0.01", "--momentum", "0.5"])
    )
    assert [(each.lr, each.momentum) for each in (default, given)] == [(0.001, 0.0), (0.01, 0.5)]
    made = TABLE["demo"].make(default, torch.nn.Linear(9, 7), as_communicator(None), steady)
    assert made.optimizer.rule.weight_decay == 0.1
    assert made.optimizer.param_groups[0]["weight_decay"] == 0


def test_a_setting_that_the_ranks_do_not_allow_is_the_users_to_mend(app: App) -> None:
    options = parse(["--algorithm", "easgd"], app, world_size=None)
    options = replace(options, own={**options.own, "alpha": 1.5})
    with pytest.raises(AgreedError, match=r"--algorithm easgd: alpha is 1.5, expected 0 < alpha < 2"):
        TABLE["easgd"].make(options, torch.nn.Linear(9, 7), as_communicator(None), steady)


def test_the_greatest_seed_is_taken(app: App) -> None:
    torch.Generator().manual_seed(parse(["--seed", str(2**64 - 1)], app, world_size=None).seed)


def test_a_warm_up_may_be_longer_than_what_is_run_of_it(app: App, tmp_path: Path) -> None:
    """A recipe tried for an epoch; a run that goes on with more epochs; one that is resumed, as it was begun."""
    config = tmp_path / "recipe.json"
    config.write_text('{"warmup_epochs": 5, "max_epochs": 140}')
    assert parse([f"--config={config}", "--max-epochs", "1"], app, world_size=None).warmup_epochs == 5
    for more in ("--resume", "--lr-schedule constant", "--milestones 5"):
        argv = f"--max-epochs 2 --warmup-epochs 3 {more}".split()
        assert parse(argv, app, world_size=None).warmup_epochs == 3
    with pytest.raises(RunError, match="--warmup-epochs 7 with --max-epochs 5"):
        parse([f"--config={config}", "--max-epochs=5", "--warmup-epochs=7"], app, world_size=None)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--milestones 5", "--milestones 5: this run ends before it, after 2; --resume with a greater --max-epochs"),
        ("--lr-schedule constant --warmup-epochs 2", "--warmup-epochs 2: this run ends before they do, after 2; "),
        ("--milestones 5 --warmup-epochs 3", "--warmup-epochs 3: this run ends before they do, after 2; "),
        ("--milestones 1 5 --warmup-epochs 1", ""),
    ],
)
def test_a_run_says_what_of_the_rate_it_does_not_come_to(
    app: App, flags: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(["--max-epochs", "2", f"--output={tmp_path / 'run'}", *flags.split()], app, world_size=None)
    run(app, options, as_communicator(None))
    said = capsys.readouterr()
    assert ("ends before" in said.out + said.err) == bool(says)
    assert says in (said.out + said.err)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("powersgd", "--dense-steps 100: this run takes 2 steps, each of which sums whole gradients\n"),
        ("powersgd --dense-steps 1", ""),
        ("gtopk --density-warmup 2", "--density-warmup 2: this run takes 2 steps, none of which has the --density\n"),
        ("gtopk --density-warmup dgc:9 --lr-schedule constant", "dgc:9: this run takes 2 steps, none of which has"),
        ("gtopk --density-warmup 1", ""),
        ("gtopk", ""),
        ("diloco", "--sync-every 20: this run takes 2 steps, and averages at its end alone\n"),
        ("diloco --lr-schedule constant", "at its end alone; --resume with a greater --max-epochs goes on\n"),
        ("local-sgd --sync-every 1", ""),
    ],
)
def test_a_run_that_is_too_short_for_its_algorithm_says_so(
    app: App, flags: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--max-epochs", "2", f"--output={tmp_path / 'run'}", "--algorithm", *flags.split()]
    run(app, parse(argv, app, world_size=None), as_communicator(None))
    said = capsys.readouterr().out
    assert ("this run takes" in said) == bool(says)
    assert says in said


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *COMPRESSORS])
def test_own_flags_reach_the_optimizer(app: App, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire_trainer.synchronisers import synchronous

    asked: list[dict[str, Any]] = []

    class Seen(DistributedOptimizer):
        def __init__(self, *given: Any, **named: Any) -> None:
            asked.append(named)
            super().__init__(*given, **named)

    monkeypatch.setattr(synchronous, "DistributedOptimizer", Seen)
    changed = {"verify": 25, "nonfinite": "skip", "wire": "bf16", "density": 0.5, "teams": 1, "rank": 3}
    changed |= {"select": "threshold", "threshold": 0.25}
    own = {name: value for name, value in changed.items() if name in {flag.name for flag in TABLE[algorithm].flags}}
    argv = [text for name, value in own.items() for text in (f"--{name}", str(value))]
    options = parse(["--algorithm", algorithm, *argv], app, world_size=None)
    made = TABLE[algorithm].make(options, torch.nn.Linear(9, 7), as_communicator(None), steady)
    [named] = asked
    given = {**named, **named["options"], **chosen(named.get("compressor"))}
    assert {name: given[name] for name in own} == own
    assert made.optimizer.param_groups[0].get("momentum", 0) == (0 if "density" in own else options.momentum)
    free = parse(["--algorithm", algorithm, *argv, "--verify", "7"], app, world_size=None)
    assert options.settings() == free.settings()


def chosen(compressor: Any) -> dict[str, Any]:
    """The own flags that the compressor shows."""
    if compressor is None:
        return {}
    return {"density": compressor.density, "select": "threshold", "threshold": getattr(compressor, "threshold", None)}


@pytest.mark.parametrize(
    ("select", "kind"),
    [("topk", TopK), ("dgc", DGCTopK), ("gaussiank", GaussianK), ("randomk", RandomK), ("threshold", Threshold)],
)
def test_a_selection_is_the_compressor_of_that_name(app: App, select: str, kind: type) -> None:
    threshold = ["--threshold", "0.1"] if select == "threshold" else []
    argv = ["--algorithm", "gtopk", "--select", select, "--density", "0.25", "--seed", "9", *threshold]
    made = (
        TABLE["gtopk"]
        .make(parse(argv, app, world_size=None), torch.nn.Linear(9, 7), as_communicator(None), steady)
        .optimizer.compressor
    )
    assert (type(made), made.density, getattr(made, "seed", 9)) == (kind, 0.25, 9)


@pytest.mark.parametrize("algorithm", ["eager-solo", "eager-majority", "eager-quorum"])
@pytest.mark.parametrize(
    ("given", "momentum", "nesterov"),
    [
        ("", 0.9, True),
        ("--no-nesterov", 0.9, False),
        ("--momentum 0", 0.0, False),
        ("--optimizer adamw", 0.5, False),
        ("--optimizer adamw --momentum 0.8", 0.8, False),
    ],
)
def test_momentum_is_of_the_kind_for_late_gradients(
    app: App, algorithm: str, given: str, momentum: float, nesterov: bool
) -> None:
    options = parse(["--algorithm", algorithm, *given.split()], app, world_size=None)
    assert (options.momentum, options.nesterov) == (momentum, nesterov)


@pytest.mark.parametrize("algorithm", [name for name, entry in TABLE.items() if entry.nesterov])
def test_nesterovs_momentum_reaches_sgd(app: App, algorithm: str) -> None:
    options = parse(["--algorithm", algorithm, "--nesterov"], app, world_size=None)
    made = TABLE[algorithm].make(options, torch.nn.Linear(9, 7), as_communicator(None), steady)
    assert made.optimizer.param_groups[0]["nesterov"]


def steady(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def test_the_page_lists_every_flag(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], app, world_size=None)
    table = (Path(__file__).parents[3] / "docs" / "apps" / "trainer.md").read_text().partition("## Flags")[2]
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert len(flags) > 20
    assert {flag for flag in flags if f"`{flag}" not in table and f" {flag}" not in table} == set()
