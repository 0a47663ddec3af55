"""--dnn: a model of the app, or where the app takes them one of the user's own, "package.module:function"."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from importlib.util import find_spec

from thinwire_trainer.app import App

OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def model_name(app: App) -> Callable[[str], str]:
    """A check of the flag's value, without importing the model."""

    def check(text: str) -> str:
        if text in app.models:
            return text
        if text in app.elsewhere:
            raise ArgumentTypeError(f"{text} is a model of another app: {app.elsewhere[text]}")
        if not (app.own_models and OWN.fullmatch(text)):
            known = ", ".join(map(repr, app.models))
            own = ", or package.module:function for a model of your own" if app.own_models else ""
            raise ArgumentTypeError(f"given {text!r}, expected one of {known}{own}")
        package = text.partition(":")[0].partition(".")[0]
        if find_spec(package) is None:
            raise ArgumentTypeError(f"{text}: there is no package {package!r} in this folder or on PYTHONPATH")
        return text

    return check


def models_help(app: App) -> str:
    """What the flag takes."""
    own = "; or package.module:function" if app.own_models else ""
    return f"model: {', '.join(app.models)}{own} (default: {next(iter(app.models))})"
