"""The next release of every package, and the one before, made in a clone as CONTRIBUTING.md says."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

from release.environment import run
from release.packages import ROOT, build, packages
from release.tag import last_version, tag

FIRST = "0.1.0"


def rehearse(folder: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Archives by package of the last releases, and of the next one, which is of what is committed here.

    A package without a tag is released as 0.1.0 first, so that there is something to upgrade from.
    """
    clone = folder / "clone"
    git = ["git", "-C", str(clone)]
    run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)])
    for setting in ("user.name a", "user.email a@example.org", "commit.gpgsign false", "tag.gpgsign false"):
        run([*git, "config", *setting.split()])
    if new := {name for name in packages(clone) if last_version(name, clone) is None}:
        tag(FIRST, new, clone)
    before = {name: str(last_version(name, clone)) for name in packages(clone)}
    for package in packages(clone).values():
        package.folder.joinpath("changes").mkdir(exist_ok=True)
        package.folder.joinpath("changes", "+rehearsal.added.md").write_text("A rehearsal.\n")
    run([*git, "add", "."])
    run([*git, "commit", "--quiet", "--message", "A change of each package"])
    last = max(map(Version, before.values()))
    following = f"{last.major}.{last.minor + 1}.0"
    tag(following, before, clone)

    def built(name: str, version: str) -> list[Path]:
        run([*git, "checkout", "--quiet", f"{name}-v{version}"])
        return build(packages(clone)[name], folder / version)

    return {name: built(name, each) for name, each in before.items()}, {name: built(name, following) for name in before}
