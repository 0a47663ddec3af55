"""Builds all wheels and sdists, and uses them as those who install them would: `hatch run release-check`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from release.archives import faults
from release.earlier import build_earlier
from release.environment import Environment, ReleaseError, linked, run
from release.kernels import check_ways
from release.packages import ROOT, Package, build, packages, wheel_of, with_siblings

SMOKE = str(Path(__file__).with_name("smoke.py"))
CORE = "thinwire-communicators"
TRAIN = "--dnn mlp --dataset digits --algorithm gtopk --density 0.05 --max-epochs 1 --output run"


def main(arguments: list[str]) -> int:
    """0 if all may be published; 1, with what went wrong, otherwise."""
    parser = argparse.ArgumentParser(prog="hatch run release-check", description=__doc__)
    parser.add_argument("--link-torch", action="store_true", help="this environment's torch, instead of installing one")
    parser.add_argument(
        "--earlier", metavar="REVISION", help="whose siblings the new core is tried with (each one's tag)"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
        try:
            check(Path(folder), link_torch=options.link_torch, earlier=options.earlier)
        except ReleaseError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def check(folder: Path, *, link_torch: bool, earlier: str | None) -> None:
    """Each step in turn; the first that fails ends it.

    Raises:
        ReleaseError: What a step found.
    """
    tree = packages()
    with step("wheels and sdists"):
        built = {name: build(package, folder / "dist") for name, package in tree.items()}
        describe(tree, built)
    wheels = {name: str(wheel_of(archives)) for name, archives in built.items()}
    with step("torch"):
        torch = linked(folder / "torch", "torch") if link_torch else installed_torch(folder / "torch")
    for name, package in tree.items():
        with step(f"{name} alone"):
            alone = Environment(folder / name, beneath=torch)
            alone.install(*(wheels[each] for each in with_siblings(package, tree)))
            print(alone.run("python", SMOKE, "first", name), end="")
    with step("with kernels and without"):
        print(*check_ways(tree["sparse-compress"], Path(wheels["sparse-compress"]), folder / "ways", torch), sep="\n")
    with step("all together"):
        everything = Environment(folder / "all", beneath=torch)
        extras = {CORE: "[mpi,testing]"}
        everything.install(*(wheel + extras.get(name, "") for name, wheel in wheels.items()), "mpich>=4")
        print(everything.run("python", SMOKE, "all", *tree), end="")
    with step("two ranks"):
        print(everything.run("mpiexec", "-n", "2", "python", "-m", "cifar", *TRAIN.split()).splitlines()[-1])
    with step("earlier siblings with the new core"):
        old = build_earlier(tree, folder / "earlier", revision=earlier)
        siblings = {name: wheel for name, wheel in old.items() if name != CORE}
        if not siblings:
            print("none: nothing was released before")
            return
        mixed = Environment(folder / "mixed", beneath=torch)
        mixed.install(wheels[CORE], *siblings.values(), *(wheels[name] for name in tree if name not in old))
        print(mixed.run("python", SMOKE, "first", *siblings), end="")


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


def installed_torch(folder: Path) -> Path:
    """Where the torch that this tree is tested with was installed, with what it needs and nothing else."""
    default = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]["dependencies"]
    environment = Environment(folder)
    environment.install(*(line for line in default if line.startswith("torch==")))
    return environment.packages


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
