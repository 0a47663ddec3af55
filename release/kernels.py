"""sparse-compress with compiled kernels and without: every way to install it says what it uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from release.environment import Environment, ReleaseError, linked
from release.packages import Package, build, wheel_of

PURE = {"SPARSE_COMPRESS_NATIVE": "0"}
BUILDS = ("hatchling", "hatch-vcs", "hatch-fancy-pypi-readme")
NUMPY = "on a CPU NumPy: installed without a compiled file"


def check_ways(package: Package, native: Path, folder: Path, torch: Path) -> Iterator[str]:
    """Installs the wheel with kernels, the pure one, and the sources where there is no compiler; what each says.

    native: the wheel as it is built here. torch: a folder with torch and what it needs.

    Raises:
        ReleaseError: A wheel bears another tag, or an install says that it uses something else.
    """
    yield _said("native", native, folder, torch, "on a CPU kernels for ")
    pure = build(package, folder / "dist", variables=PURE)
    source = next(str(path) for path in pure if path.name.endswith(".tar.gz"))
    yield _said("pure", wheel_of(pure), folder, torch, NUMPY)
    from_source = Environment(folder / "source", beneath=torch, bare=True)
    builders = linked(folder / "builders", *BUILDS)
    (from_source.packages / "builders.pth").write_text(f"{builders}\n")
    from_source.install("--no-build-isolation", source)
    yield _uses("source", from_source, NUMPY)


def _said(way: str, wheel: Path, folder: Path, torch: Path, expected: str) -> str:
    if wheel.name.endswith("-py3-none-any.whl") != (way == "pure") or "-py3-none-" not in wheel.name:
        raise ReleaseError(f"{wheel.name} was expected to be a {way} wheel for any Python 3")
    environment = Environment(folder / way, beneath=torch)
    environment.install(str(wheel))
    return _uses(way, environment, expected)


def _uses(way: str, environment: Environment, expected: str) -> str:
    line = environment.run("python", "-m", "sparse_compress").strip()
    if expected not in line:
        raise ReleaseError(f"sparse-compress, {way}, says {line!r}, expected {expected!r}")
    select = "import torch, sparse_compress as s; print(s.topk(torch.tensor([1., 3, 2]), 1).indices.item())"
    if environment.run("python", "-c", select).strip() != "1":
        raise ReleaseError(f"sparse-compress, {way}, selects something else")
    return f"{way}: {line}"
