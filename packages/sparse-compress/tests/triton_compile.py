"""Compile every kernel ahead of time for NVIDIA GPUs, which takes none: a line of JSON for each kernel and target.

python triton_compile.py     started by test_compress_triton.py, without TRITON_INTERPRET
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from sparse_compress.gpu import accumulate, compact, radix, select
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TARGETS = (80, 90)
FLOATS = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}  # float16 differs from bfloat16 by one conversion
FLOAT32_ARGUMENTS = {"residual", "new_residual", "velocity", "new_velocity", "values"}


def cases():
    """(kernel, types of those arguments that are no int32 pointers, constants, warps)."""
    for dtype, pointer in FLOATS.items():
        for momentum in (False, True):
            types = {"gradient": pointer, "momentum": "fp32"}
            yield accumulate.accumulate, types, {"MOMENTUM": momentum}, select.WARPS
        x = {"x": pointer}
        yield accumulate.find_maxima, x, {}, select.WARPS
        shift, width = select.DIGITS[dtype][-1]
        yield radix.count_digits, x, {"SHIFT": shift, "WIDTH": width, "LISTED": True}, select.WARPS
        x |= {"counts": "*i64", "blocks": "i32"}
        yield compact.count_selected, x, {}, select.WARPS
        yield compact.write_selected, x, {"CLEAR": False, "MOMENTUM": False}, select.WRITE_WARPS
    yield compact.write_selected, x | {"x": "*fp32"}, {"CLEAR": True, "MOMENTUM": True}, select.WRITE_WARPS
    yield radix.count_digits, {}, {"SHIFT": 23, "WIDTH": 8, "LISTED": False}, select.WARPS
    for kernel in (compact.count_lines, compact.list_lines):
        yield kernel, {"lines": "i32"}, {}, select.WARPS
    yield radix.pick_digit, {"k": "i32"}, {"SHIFT": 23, "FIRST": True}, select.WARPS


def compile_for(target, kernel, types, constants, warps):
    """As the launches do it for pointers and sizes that are multiples of 16."""
    if "BLOCK" in kernel.arg_names:
        constants = constants | {"BLOCK": select.TILING.block}
    types = dict.fromkeys(FLOAT32_ARGUMENTS, "*fp32") | {"n": "i32"} | types | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
    places = dict(zip(kernel.arg_names, range(len(signature)), strict=True))
    constexprs = {(places[name],): value for name, value in constants.items()}
    aligned = [place for name, place in places.items() if name == "n" or signature[name].startswith("*")]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def facts(compiled):
    """Registers a thread, bytes of its local memory (spills go there), and what the instructions are."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(re.search(r"\bREG:(\d+)", usage).group(1)),
        "spilled": sum(int(re.search(rf"\b{place}:(\d+)", usage).group(1)) for place in ("STACK", "LOCAL")),
        "fused or flushed": len(re.findall(r"\bfma\.|\.ftz", ptx)),
        "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
    }


def main():
    assert "TRITON_INTERPRET" not in os.environ
    for kernel, types, constants, warps in cases():
        for target in TARGETS:
            compiled = compile_for(target, kernel, types, constants, warps)
            line = {"kernel": kernel.__name__, "sm": target, "types": types, "constants": constants, "warps": warps}
            json.dump(line | facts(compiled), sys.stdout)
            print(flush=True)


if __name__ == "__main__":
    main()
