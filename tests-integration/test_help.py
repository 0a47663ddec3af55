"""What --help says is what an app does without flags."""

import re

import pytest
from thinwire_cifar.__main__ import APP as CIFAR
from thinwire_deepspeech.__main__ import APP as DEEPSPEECH
from thinwire_text.__main__ import APP as TEXT
from thinwire_trainer.app import App
from thinwire_trainer.command_line.flags import entries_of, parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.command_line.parser import parser_of

pytestmark = pytest.mark.quick

APPS = {app.module: app for app in (CIFAR, DEEPSPEECH, TEXT)}
LATER = {
    "--milestones",
    "--output",
    "--checkpoint-every",
    "--compressor",
    "--at-least",
}  # whose default hangs on other flags


def said(app: App) -> dict[str, tuple[str, str]]:
    """Option by name -> its flag, and the default that the help names."""
    found = {}
    for action in parser_of(app, entries_of(app))._actions:
        shown = re.search(r"default: ([^;,)]+)", (action.help or "") % {**vars(action), "prog": ""})
        if shown and action.option_strings[0] not in LATER:
            found[action.dest] = (action.option_strings[0], shown[1].strip())
    return found


def done(options: Options, name: str, says: str) -> bool:
    value = {**vars(options), **options.app, **options.own}[name]
    texts = {"on": True, "off": False, "none": None}
    return (says in texts and value is texts[says]) or str(value) == says or str(value) == f"{says}.0"


@pytest.mark.parametrize("name", APPS)
def test_the_help_shows_the_apps_own_defaults(name: str) -> None:
    app = APPS[name]
    options, defaults = parse([], app, world_size=None), said(app)
    assert app.defaults.keys() <= defaults.keys()
    for option, (flag, says) in defaults.items():
        if option in vars(options) or option in options.app or option in options.own:
            assert done(options, option, says), (flag, says)
