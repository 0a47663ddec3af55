"""Wheels of an earlier state of the tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

from release.environment import ReleaseError, run
from release.packages import ROOT, Package, build, packages, wheel_of


def build_earlier(tree: dict[str, Package], folder: Path, *, revision: str | None) -> dict[str, str]:
    """Wheels by package, of a given revision, or each of its own last tag; packages that had none are left out.

    Raises:
        ReleaseError: There is no such revision.
    """
    revisions = {name: revision or last_tag(name) for name in tree}
    wheels = {}
    for each in sorted(set(filter(None, revisions.values()))):
        clone = folder / each
        run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(clone)])
        run(["git", "-C", str(clone), "checkout", "--quiet", "--detach", each])
        for name, package in packages(clone).items():
            if revisions.get(name) == each:
                wheels[name] = str(wheel_of(build(package, clone / "dist")))
    return wheels


def last_tag(name: str) -> str | None:
    """The last release of a package before this commit, if there was one: tags of this commit are what is checked."""
    command = ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0", "--match", f"{name}-v*", "HEAD~"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "No names found" not in done.stderr and "No tags can describe" not in done.stderr:
        raise ReleaseError(f"git describe of {name}: {done.stderr}")
    return done.stdout.strip() or None
