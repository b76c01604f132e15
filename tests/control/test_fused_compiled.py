"""The fused kernel compiles for a GPU, on a machine without one. (The interpreter accepts more than the compiler.)"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if not hasattr(triton, "knobs"):
    pytest.skip("an older Triton is called with other arguments", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gyroscope.control import fused  # noqa: E402
from gyroscope.control.steering import Law, Ledger  # noqa: E402

POINTERS = {torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"}


def registers(rule: str, hyper: fused.Hyper, dtype: torch.dtype) -> int:
    """Compile a rule for compute capability 9.0, and return the number of registers per thread."""
    launch = fused.Launch([[torch.zeros(64, 64, dtype=dtype)]] * 4, [0], [1])
    ledger = Ledger.blank(1, torch.device("cpu"))
    arguments = launch._arguments(rule, hyper, 0.1, ledger, Law(), rule == "given")
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(fused.step_kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[i,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[i,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fused.step_kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused._WARPS})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = Path(compiled.metadata_group[f"{compiled.metadata.name}.cubin"])
    said = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", said)[1])


@pytest.mark.parametrize("rule", fused.RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rule_compiles_and_leaves_registers_for_four_programs_per_multiprocessor(rule, dtype):
    hyper = fused.Hyper(decoupled=rule in ("nadam", "radam") and dtype == torch.bfloat16)
    assert registers(rule, hyper, dtype) <= 128
