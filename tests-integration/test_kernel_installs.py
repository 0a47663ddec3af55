"""sparse-compress from a native wheel, a pure one, and its sources without a compiler; `release-check` does it too."""

from __future__ import annotations

import pytest
from sparse_compress.native.compiling import compile_kernels

from release.environment import ReleaseError, linked
from release.kernels import check_ways
from release.packages import build, packages, wheel_of


@pytest.mark.few(0)
def test_every_install_says_what_it_uses(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARSE_COMPRESS_NATIVE", raising=False)
    reason = compile_kernels(tmp_path / "kernels.so")
    if reason is not None:
        pytest.skip(f"nothing can be compiled here: {reason}")
    package, torch = packages()["sparse-compress"], linked(tmp_path / "torch", "torch", "numpy")
    native = wheel_of(build(package, tmp_path / "dist"))
    assert native.stat().st_size < 200_000
    assert [line.partition(":")[0] for line in check_ways(package, native, tmp_path / "ways", torch)] == [
        "native",
        "pure",
        "source",
    ]
    with pytest.raises(ReleaseError, match="was expected to be a native wheel"):
        next(check_ways(package, tmp_path / "sparse_compress-1-py3-none-any.whl", tmp_path, torch))
