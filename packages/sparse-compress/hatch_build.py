"""Wheels with compiled kernels where there is a C compiler, pure ones elsewhere or where $SPARSE_COMPRESS_NATIVE is 0.

The compiled file knows no Python, no torch and no C library by name, so its wheel says py3-none and the platform alone.
"""

import platform
import runpy
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src", "sparse_compress", "native")


class Kernels(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Compiles ``kernels.c``: beside it for an editable install, else into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Says in one line which wheel it becomes."""
        native = Path(self.root, NATIVE)
        editable = version == "editable"
        self._folder = tempfile.TemporaryDirectory()
        target = native / "kernels.so" if editable else Path(self._folder.name, "kernels.so")
        reason = runpy.run_path(str(native / "compiling.py"))["compile_kernels"](target)
        if reason is not None:
            self.app.display_warning(f"sparse-compress: without compiled kernels, in NumPy: {reason}")
            return
        self.app.display_info("sparse-compress: with compiled kernels")
        if not editable:
            build_data["force_include"][str(target)] = "sparse_compress/native/kernels.so"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Throws the compiled file away, which the wheel holds."""
        self._folder.cleanup()


def _platform() -> str:
    """Linux of any C library; else what Python was built for."""
    if sys.platform == "linux":
        machine = platform.machine()
        return f"manylinux_2_17_{machine}.musllinux_1_1_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
