"""Makes a release of packages: `python -m release.tag VERSION [NAME ...]`; without names, of all that have fragments.

Each one's changelog is made of its fragments, and its siblings are bound to at least what it was tested with:
their version of this release, or that of their last tag. That is committed, and tagged once a package.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from release.environment import ReleaseError, run
from release.packages import ROOT, Package, packages

SIBLINGS = re.compile(r"^dependencies = .*?(?=^\[project\.(?:scripts|urls)\])", re.MULTILINE | re.DOTALL)
"""What a pyproject.toml requires, its extras too."""


def main(arguments: list[str]) -> int:
    """0 if all are tagged; 1, with what stands against it, otherwise."""
    parser = argparse.ArgumentParser(prog="python -m release.tag", description=__doc__)
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("names", metavar="NAME", nargs="*")
    options = parser.parse_args(arguments)
    try:
        print(*tag(options.version, options.names or with_fragments(packages())), sep="\n")
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def tag(version: str, names: Iterable[str], root: Path = ROOT) -> list[str]:
    """Releases these packages of the tree in `root`, all as one version; the tags.

    Raises:
        ReleaseError: A package is unknown, or this is no later version; something is not committed; or a sibling that
            is needed has changed since its release, or had none.
    """
    tree, names = packages(root), set(names)
    if not names or names - tree.keys():
        given = ", ".join(sorted(names - tree.keys())) or "no package"
        raise ReleaseError(f"{given} is to be released; this tree's are {', '.join(tree)}")
    if changed := run(["git", "-C", str(root), "status", "--porcelain"]):
        raise ReleaseError(f"a release is made of what is committed; here is more:\n{changed}")
    last = {name: last_version(name, root) for name in tree}
    if late := sorted(f"{name} {last[name]}" for name in names if Version(version) <= Version(last[name] or "0")):
        raise ReleaseError(f"{version} does not come after {', '.join(late)}")
    needed = {sibling for name in names for sibling in tree[name].requires & tree.keys() - names}
    if new := sorted(name for name in needed if not _is_released(tree[name], last[name], root)):
        raise ReleaseError(f"release them too, which are needed and not released as they are here: {', '.join(new)}")
    versions = last | dict.fromkeys(names, version)
    for name in sorted(names):
        words = ["--config", str(root / "towncrier.toml"), "--dir", str(tree[name].folder), "--name", name]
        tree[name].folder.joinpath("changes").mkdir(exist_ok=True)
        run([sys.executable, "-m", "towncrier", "build", "--yes", *words, "--version", version], folder=root)
        bind(tree[name], {sibling: each for sibling, each in versions.items() if each and sibling != name})
    tags = [f"{name}-v{version}" for name in sorted(names)]
    said = ["--message", f"Release {version}", "--message", "\n".join(tags)]
    run(["git", "-C", str(root), "commit", "--quiet", "--all", *said])
    for each in tags:
        run(["git", "-C", str(root), "tag", each])
    return tags


def bind(package: Package, versions: dict[str, str]) -> None:
    """Writes into its pyproject.toml that each of these siblings is needed in this version or a later one."""
    file = package.folder / "pyproject.toml"
    text = file.read_text()
    [required] = SIBLINGS.findall(text)
    bound = required
    for name, version in versions.items():
        bound = re.sub(rf'"{name}(\[[^\]"]*\])?(>=[^"]*)?"', rf'"{name}\g<1>>={version}"', bound)
    file.write_text(text.replace(required, bound))


def _is_released(package: Package, version: str | None, root: Path) -> bool:
    """Whether that version has the package's code as it is here."""
    differs = [
        "git",
        "-C",
        str(root),
        "diff",
        "--name-only",
        f"{package.name}-v{version}",
        "--",
        f"{package.folder}/src",
    ]
    return version is not None and not run(differs)


def with_fragments(tree: dict[str, Package]) -> set[str]:
    """Names of the packages that something was changed in, as a user sees it."""
    return {name for name, package in tree.items() if any(package.folder.glob("changes/*.md"))}


def last_version(name: str, root: Path = ROOT) -> str | None:
    """Version of a package's last release as of this commit, if there was one."""
    command = ["git", "-C", str(root), "describe", "--tags", "--abbrev=0", "--match", f"{name}-v*"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode and "No names found" not in done.stderr and "No tags can describe" not in done.stderr:
        raise ReleaseError(f"git describe of {name}: {done.stderr}")
    return done.stdout.strip().removeprefix(f"{name}-v") or None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
