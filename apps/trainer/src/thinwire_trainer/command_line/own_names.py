"""The names of an app's own flags: none may be another flag's, or another entry's of config.json."""

from collections.abc import Collection
from dataclasses import fields

from thinwire_trainer.app import App
from thinwire_trainer.command_line.config_file import RECORDED
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.errors import UsageError

ENTRIES = RECORDED | {field.name for field in fields(Options)}


def require_own_names(app: App, *, common: Collection[str], algorithms: Collection[str]) -> None:
    """UsageError, naming the flag and the app, for a name that is taken.

    common: of the trainer's flags. algorithms: of those that single algorithms have, the app's among them.
    """
    for name in algorithms:
        _require_free(app, name, dict.fromkeys({*common, *ENTRIES, "help"}, "the trainer"))
    taken = dict.fromkeys(algorithms, "an algorithm") | dict.fromkeys({*common, *ENTRIES, "help"}, "the trainer")
    for flag in app.flags:
        _require_free(app, flag.name, taken)
        taken[_positive(flag.name)] = "another flag of its own"


def _require_free(app: App, name: str, taken: dict[str, str]) -> None:
    if not name.isidentifier():
        raise UsageError(
            f"{app.module} defines a flag {name!r:.40}: name it by letters, digits and _ (which is - there)"
        )
    if (owner := taken.get(_positive(name))) is not None:
        raise UsageError(f"{app.module} defines a flag {name!r:.40}, a name that {owner} has: give it another")


def _positive(name: str) -> str:
    """--no-NAME is spoken of together with --NAME."""
    return name.removeprefix("no_")
