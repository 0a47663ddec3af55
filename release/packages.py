"""What this tree publishes: a wheel and an sdist of each package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Package:
    """A folder with a pyproject.toml of its own."""

    folder: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        """Its `[project]` table."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def name(self) -> str:
        """What it is installed by."""
        return str(self.project["name"])

    @property
    def module(self) -> str:
        """What it is imported by: the one package in src/."""
        [source] = (path for path in self.folder.glob("src/*") if (path / "__init__.py").exists())
        return source.name

    @property
    def commands(self) -> set[str]:
        """Short names that `python -m` finds beside the module: folders that are no packages."""
        return {path.name for path in self.folder.glob("src/*") if path.is_dir()} - {self.module}

    @property
    def extras(self) -> dict[str, list[str]]:
        """What may be installed beside it, by the extra's name."""
        found: dict[str, list[str]] = self.project.get("optional-dependencies", {})
        return found

    @property
    def requires(self) -> set[str]:
        """Names of the distributions that it cannot do without."""
        return {name_of(requirement) for requirement in self.project["dependencies"]}


def packages(root: Path = ROOT) -> dict[str, Package]:
    """All packages of a tree by name, those first that others need."""
    found = [Package(file.parent) for file in sorted(root.glob("packages/*/pyproject.toml"))]
    found += [Package(file.parent) for file in sorted(root.glob("apps/*/pyproject.toml"))]
    by_name = {package.name: package for package in found}
    return dict(sorted(by_name.items(), key=lambda item: len(with_siblings(item[1], by_name))))


def with_siblings(package: Package, among: dict[str, Package]) -> set[str]:
    """Its name, and those of the packages of this tree that it needs, directly or not."""
    names = {package.name}
    for name in package.requires & set(among):
        names |= with_siblings(among[name], among)
    return names


def name_of(requirement: str) -> str:
    """The distribution that a requirement names: "torch>=2.6" is torch."""
    matched = re.match(r"[\w.-]+", requirement)
    if matched is None:
        raise ValueError(f"{requirement!r} is no requirement: it was expected to begin with a name, such as torch>=2.6")
    return matched[0]


def build(package: Package, into: Path, *, variables: Mapping[str, str] | None = None) -> list[Path]:
    """Its sdist, and the wheel that is built from this sdist alone, under these environment variables too; their paths.

    What builds them is taken from this environment, which names the same: nothing is fetched.
    """
    folder = into / package.name
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(package.folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(variables or {})})
    if done.returncode:
        raise RuntimeError(f"{package.name} cannot be built:\n{done.stdout}{done.stderr}")
    return sorted(folder.iterdir())


def wheel_of(archives: list[Path]) -> Path:
    """The one wheel among what was built."""
    [wheel] = (path for path in archives if path.suffix == ".whl")
    return wheel
