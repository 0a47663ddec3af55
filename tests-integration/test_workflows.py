"""The public CI's files are what their service takes, and name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from release.packages import ROOT, packages

WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def follows_schema(*files):
    words = ["--builtin-schema", "vendor.github-workflows", *map(str, files)]
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *words], capture_output=True, text=True, timeout=60
    )


def test_they_follow_the_schema(tmp_path):
    done = follows_schema(*WORKFLOWS)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs-at:"))
    assert follows_schema(wrong).returncode != 0


def test_every_hatch_command_is_there():
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    text = "".join(file.read_text() for file in WORKFLOWS)
    commands = re.findall(r"hatch run ([\w-]+:)?([\w-]+)", text)
    assert commands
    for environment, script in commands:
        assert environment.rstrip(":") in {"", *environments}
        own = environments[environment.rstrip(":") or "default"].get("scripts", {})
        assert script in {**environments["default"]["scripts"], **own}


@pytest.mark.parametrize("package", packages().values(), ids=lambda package: package.name)
def test_every_python_that_is_promised_is_tried(package):
    tried = set(re.findall(r'"(3\.\d+)"', re.search(r"python: \[.*\]", WORKFLOWS[0].read_text())[0]))
    told = re.findall(r"Python :: (3\.\d+)$", "\n".join(package.project["classifiers"]), re.MULTILINE)
    assert told
    assert set(told) <= tried
