"""Environments outside the tree, in which only what was installed can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution, distributions
from pathlib import Path


class ReleaseError(Exception):
    """A command that did not do what a release needs; says what it wrote."""


class Environment:
    """A virtual environment without pip; what another one holds may lie beneath it."""

    def __init__(
        self, folder: Path, *, beneath: Path | None = None, index: str | None = None, bare: bool = False
    ) -> None:
        """Makes it in `folder`; what the folder `beneath` holds can be imported, and counts as installed.

        index: address of the only index that pip asks; pip's own settings without one.
        bare: its programs, and what builds for it, find no others: no compiler, and no MPI.
        """
        self.folder = folder
        self._variables = {"PATH": str(folder / "bin"), "CC": "/nowhere/cc"} if bare else {}
        self._only = [] if index is None else ["--isolated", "--no-cache-dir", "--index-url", index]
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        [self.packages] = folder.glob("lib/python*/site-packages")
        if beneath is not None:
            (self.packages / "beneath.pth").write_text(f"{beneath}\n")

    def install(self, *words: str) -> None:
        """Installs with the pip that runs this, asking this environment's index alone where it has one."""
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        to = ["--python", str(self.folder / "bin" / "python"), "install", "--prefer-binary", *self._only]
        run([*pip, *to, *words], variables=self._variables | ({"PIP_CONFIG_FILE": os.devnull} if self._only else {}))

    def run(self, *words: str, timeout: float = 300) -> str:
        """What a program of its own writes; its working folder is the environment's."""
        command = [str(self.folder / "bin" / words[0]), *words[1:]]
        return run(command, folder=self.folder, timeout=timeout, variables=self._variables)

    def versions(self) -> dict[str, str]:
        """Versions of the distributions that were installed into it, by name.

        Raises:
            ReleaseError: There is one twice, or a file that none of them put there.
        """
        found = list(distributions(path=[str(self.packages)]))
        installed = {each.name: each.version for each in found}
        owned = {Path(str(file.locate())).resolve() for each in found for file in each.files or ()}
        there = {path.resolve() for path in self.packages.rglob("*") if path.is_file()}
        foreign = [str(path) for path in there - owned if path.suffix not in (".pyc", ".pth")]
        if foreign or len(installed) < len(found):
            raise ReleaseError(f"{self.folder} holds {[each.name for each in found]}, and of none of them: {foreign}")
        return installed


def run(
    command: list[str],
    *,
    folder: Path | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What a command writes; of this process's environment it sees nothing of Python, and these variables besides.

    Raises:
        ReleaseError: It ended with another status than 0, or did not end in time.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept["PATH"] = os.pathsep.join([str(Path(command[0]).parent), kept.get("PATH", os.defpath)])
    kept |= variables or {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, **pipes, text=True, cwd=folder, env=kept, timeout=timeout)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"{' '.join(command)} did not end within {timeout} s\n{error.output}") from error
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
    return str(done.stdout)


def linked(folder: Path, *names: str) -> Path:
    """A folder that holds these distributions of this environment, and those that they need, as links."""
    folder.mkdir()
    found = [distribution(each) for each in sorted(_needed_by(names))]
    files = {file.parts[0]: one.locate_file(file.parts[0]) for one in found for file in one.files or ()}
    for top in files.keys() - {"..", "__pycache__"}:  # several have a part in one, as NVIDIA's in `cuda`
        (folder / top).symlink_to(Path(str(files[top])))
    return folder


def _needed_by(lines: Iterable[str]) -> set[str]:
    """The distributions that these requirements name, and those that they need here; of extras what is asked for."""
    from packaging.requirements import Requirement

    asked, new = set[tuple[str, str]](), [Requirement(line) for line in lines]
    while new:
        requirement = new.pop()
        for extra in {"", *requirement.extras} - {extra for name, extra in asked if name == requirement.name}:
            asked.add((requirement.name, extra))
            needs = map(Requirement, distribution(requirement.name).requires or ())
            new += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in asked}
