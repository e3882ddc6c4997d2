"""Flags of XLA for programs that tests start."""

import importlib.metadata
import os

# XLA's older way of writing kernels takes half the time to compile, and one piece of LLVM for a program a
# third less than 32, which are for threads that nobody has left where tests run side by side. JAX 0.11 has
# the first no longer, and stops at a flag that it does not know. There the clipping suite is compiled as
# users compile; CI runs it on both.
_OLDER = importlib.metadata.version("jaxlib").startswith("0.10.")
QUICK_KERNELS = (
    ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    if _OLDER
    else []
)
USUAL_KERNELS = (
    {"xla_cpu_use_fusion_emitters": True} if _OLDER else {}
)  # compiler options of one program

CHEAP = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def xla_flags(*more):
    """Those of the tests themselves, and more, each once: programs are found again by these words as well.

    XLA takes what begins with a space for the name of a file.
    """
    return {"XLA_FLAGS": " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *more]))}


def on_devices(count, *more):
    """The environment of a program on so many devices of a CPU."""
    devices = f"--xla_force_host_platform_device_count={count}"
    return {"JAX_PLATFORMS": "cpu"} | xla_flags(devices, *more)
