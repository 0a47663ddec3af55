"""Law: what an app's command line accepts is recorded so that the record gives the same run again."""

import json
import random
from argparse import Action, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Iterator
from pathlib import Path

import pytest
from thinwire_cifar.__main__ import APP as CIFAR
from thinwire_deepspeech.__main__ import APP as DEEPSPEECH
from thinwire_text.__main__ import APP as TEXT
from thinwire_trainer.app import App
from thinwire_trainer.command_line.config_file import IGNORED
from thinwire_trainer.command_line.flags import entries_of, parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.command_line.parser import parser_of, spelt
from thinwire_trainer.errors import RunError
from thinwire_trainer.synchronisers.table import owners

APPS = {app.module: app for app in (CIFAR, DEEPSPEECH, TEXT)}
VALUES = ("0", "1", "2", "3", "0.05", "0.3", "1.5", "auto", "dgc:3", "0.5x", "fixed:0=0.1", "none")


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_the_config_of_every_run_gives_it_again(app: App, tmp_path: Path) -> None:
    drawn = random.Random(app.module)
    for algorithm in entries_of(app):
        argv = accepted(app, algorithm, drawn)
        first = parse(argv, app, world_size=None)
        config = tmp_path / "config.json"
        config.write_text(json.dumps(first.recorded()))
        again = parse([f"--config={config}"], app, world_size=None)
        assert trained_how(again) == trained_how(first), argv


def trained_how(options: Options) -> dict[str, object]:
    return {name: value for name, value in options.flags().items() if name not in IGNORED}


def accepted(app: App, algorithm: str, drawn: random.Random) -> list[str]:
    """Half of the flags of this algorithm, in any order, each with a value that it and those before it take."""
    table = entries_of(app)
    others = owners(table).keys() - {flag.name for flag in table[algorithm].flags}
    actions = [action for action in parser_of(app, table)._actions if action.dest not in IGNORED | others | APART]
    argv = [f"--algorithm={algorithm}", "--nworkers=4"]
    for action in drawn.sample(actions, len(actions) // 2):
        for words in drawn.sample(found := list(spellings(action)), len(found)):
            try:
                parse([*argv, *words], app, world_size=None)
            except RunError:
                continue
            argv += words
            break
    return argv


APART = {"help", "algorithm", "nworkers", "compression", "compressor"}


def spellings(action: Action) -> Iterator[list[str]]:
    """The flag with each value of its own type."""
    if isinstance(action, BooleanOptionalAction):
        yield from ([spelling] for spelling in action.option_strings)
        return
    for value in action.choices or VALUES:
        try:
            read = action.type(value) if callable(action.type) else value
        except (ArgumentTypeError, RunError, ValueError):
            continue
        yield [spelt(action.dest), str(read)] if action.nargs else [f"{spelt(action.dest)}={value}"]
