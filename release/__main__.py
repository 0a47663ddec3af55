"""Rehearses a release: builds all wheels and sdists, and installs and uses them by name: `hatch run release-check`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.utils import parse_wheel_filename

from release.archives import faults
from release.environment import Environment, ReleaseError, run
from release.index import served
from release.kernels import check_ways
from release.packages import ROOT, Package, packages, wheel_of, with_siblings
from release.rehearsal import rehearse

SMOKE, FIRST_STEP = (str(Path(__file__).with_name(name)) for name in ("smoke.py", "first_step.py"))
CORE, USED = "thinwire-communicators", "sparse-collectives"
EXTRAS = {CORE: "[mpi,testing]"}
TRAIN = "--dnn mlp --dataset digits --algorithm gtopk --density 0.05 --max-epochs 1 --output run"
TWO_RANKS = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
PATIENCE = 60.0
"""Seconds from `pip install` to the end of the first step with torch's wheel here, on a machine that does nothing else.

Compared with what is computed in them: pip does one thing after the other, and others may use the machine too."""


def main(arguments: list[str]) -> int:
    """0 if all may be published; 1, with what went wrong, otherwise."""
    argparse.ArgumentParser(prog="hatch run release-check", description=__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
        try:
            check(Path(folder))
        except ReleaseError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def check(folder: Path) -> None:
    """Each step in turn; the first that fails ends it.

    Raises:
        ReleaseError: What a step found.
    """
    tree = packages()
    with step("the releases before, and the next, of what is committed"):
        before, built = rehearse(folder)
        describe(tree, built)
    wheels = {name: wheel_of(archives) for name, archives in built.items()}
    with step("what they need of others"):
        others = needed(wheels, folder / "others")
    ours = [archive for released in (before, built) for archives in released.values() for archive in archives]
    with served([*others, *ours], folder / "index") as index:
        with step(f"pip install {USED}, and the first step of two ranks, without a compiler and MPI"):
            first_step(Environment(folder / "first", index=index, bare=True))
        torch = Environment(folder / "torch", index=index)
        with step("torch, beneath all others"):
            torch.install("torch")

        def environment(name: str, *, bare: bool = False) -> Environment:
            return Environment(folder / name, beneath=torch.packages, index=index, bare=bare)

        with step("upgrade"):
            old, new = (
                {name: version_of(released[name]) for name in with_siblings(tree[USED], tree)}
                for released in (before, built)
            )
            upgrade(environment("upgraded", bare=True), old, new)
            refused(environment("refused"), f"{USED}=={new[USED]}", f"{CORE}=={old[CORE]}")
        with step("the siblings before with the new core"):
            mixed = environment("mixed")
            mixed.install(f"{CORE}=={new[CORE]}", *(f"{n}=={version_of(before[n])}" for n in tree if n != CORE))
            print(mixed.run("python", SMOKE, "first", *tree), end="")
        for name in tree:
            with step(f"{name} alone"):
                alone = environment(name)
                alone.install(name)
                print(alone.run("python", SMOKE, "first", name), end="")
        with step("with kernels and without"):
            ways = check_ways(tree["sparse-compress"], wheels["sparse-compress"], folder / "ways", torch.packages)
            print(*ways, sep="\n")
        with step("all together"):
            everything = environment("all")
            everything.install(*(name + EXTRAS.get(name, "") for name in tree), "mpich")
            print(everything.run("python", SMOKE, "all", *tree), end="")
        with step("two ranks of MPI"):
            print(everything.run("mpiexec", "-n", "2", "python", "-m", "cifar", *TRAIN.split()).splitlines()[-1])


def first_step(user: Environment) -> None:
    """Installs as the README says, by name, and takes a step.

    Raises:
        ReleaseError: It takes too long.
    """
    begun, used = time.monotonic(), processor_seconds()
    user.install(USED)
    installed = time.monotonic() - begun
    user.run(*TWO_RANKS, FIRST_STEP)
    taken, used = time.monotonic() - begun, processor_seconds() - used
    print(f"{user.versions()}\npip: {installed:.1f} s, first step after {taken:.1f} s, of which {used:.1f} s computed")
    if used > PATIENCE:
        raise ReleaseError(f"{used:.1f} s of a processor until the first step, expected {PATIENCE:.0f} s at most")


def processor_seconds() -> float:
    """Time that processors have spent on what this process has started, and waited for."""
    now = os.times()
    return now.children_user + now.children_system


def upgrade(user: Environment, old: dict[str, str], new: dict[str, str]) -> None:
    """Upgrades by name: siblings go along, no file is left over, and a step ends before and after.

    Raises:
        ReleaseError: Other versions are there.
    """
    then = [f"{name}=={version}" for name, version in old.items()]
    for words, expected in ((then, old), (["--upgrade", USED], new)):
        user.install(*words)
        found = {name: version for name, version in user.versions().items() if name in expected}
        print(f"pip install {' '.join(words)}: {found}")
        if found != expected:
            raise ReleaseError(f"expected {expected}")
        user.run(*TWO_RANKS, FIRST_STEP)


def refused(user: Environment, *words: str) -> None:
    """Checks that pip refuses to install these together.

    Raises:
        ReleaseError: It installed them, or failed otherwise.
    """
    try:
        user.install(*words)
    except ReleaseError as error:
        if "ResolutionImpossible" not in str(error):
            raise
        print(f"pip install {' '.join(words)}: refused")
        return
    raise ReleaseError(f"{words} were installed together, {user.versions()}: the one does not bind the other")


def needed(wheels: dict[str, Path], folder: Path) -> list[Path]:
    """Wheels of other projects that these need, with the torch that this tree is tested with; pip caches them."""
    default = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["dependencies"]
    torch = [line for line in default if line.startswith("torch==")]
    ours = [f"{wheel}{EXTRAS.get(name, '')}" for name, wheel in wheels.items()]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--prefer-binary"]
    run([*pip, "--dest", str(folder), *torch, "mpich>=4", *ours])
    return [path for path in folder.iterdir() if path.name not in {wheel.name for wheel in wheels.values()}]


def version_of(archives: list[Path]) -> str:
    """Version of the wheel among them."""
    return str(parse_wheel_filename(wheel_of(archives).name)[1])


@contextmanager
def step(name: str) -> Iterator[None]:
    """Says what begins, and how long it took."""
    begun = time.monotonic()
    print(f"-- {name}", flush=True)
    yield
    print(f"   {time.monotonic() - begun:.0f} s", flush=True)


def describe(tree: dict[str, Package], built: dict[str, list[Path]]) -> None:
    """Refuses archives that an index would refuse, or show wrongly.

    Raises:
        ReleaseError: Names each archive and its faults.
    """
    archives = [(tree[name], archive) for name, files in built.items() for archive in files]
    found = [f"{archive.name} {fault}" for package, archive in archives for fault in faults(package, archive)]
    if found:
        raise ReleaseError("\n".join(found))
    run([sys.executable, "-m", "twine", "check", "--strict", *(str(archive) for _, archive in archives)])
    print(*(archive.name for _, archive in archives), sep="\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
