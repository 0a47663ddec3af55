"""The recipes of the papers, as files that --config takes."""

import json
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
from thinwire_cifar.__main__ import APP
from thinwire_cifar.catalogue import DATASETS, MODELS
from thinwire_trainer.command_line.flags import parse
from thinwire_trainer.command_line.options import Options
from thinwire_trainer.synchronisers.table import TABLE

pytestmark = pytest.mark.quick

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.json"))


def offered() -> str:
    shown = StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit):
        parse(["--help"], APP, world_size=None)
    return shown.getvalue()


@pytest.mark.parametrize("file", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_run(file: Path) -> None:
    recipe = json.loads(file.read_text())
    if recipe["algorithm"] not in TABLE:
        pytest.skip(f"--algorithm {recipe['algorithm']} is not in this tree")
    if "--config" not in offered():
        pytest.skip("--config is not in this tree")
    options = parse(["--config", str(file)], APP, world_size=None)
    found = options.flags()
    assert {name: found[name] for name in recipe} == recipe


@pytest.mark.parametrize("file", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_what_there_is(file: Path) -> None:
    recipe = json.loads(file.read_text())
    assert recipe["dnn"] in MODELS
    assert recipe["dataset"] in DATASETS
    own = {flag.name for flag in TABLE[recipe["algorithm"]].flags} if recipe["algorithm"] in TABLE else set()
    optional = {"nesterov", "milestones"}
    assert set(recipe) <= {field.name for field in fields(Options)} | own | optional


def test_the_page_explains_each() -> None:
    page = (FOLDER.parents[2] / "docs" / "apps" / "cifar.md").read_text()
    assert len(RECIPES) == 4
    for file in RECIPES:
        assert f"recipes/{file.name}" in page
