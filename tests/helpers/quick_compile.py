"""Flags with which XLA compiles tests quickly."""

from importlib.metadata import version

# What XLA and LLVM do to make kernels quick takes most of the time of tests and has no part in what
# they compare.
QUICK_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # tests keep both cores busy as it is
]
if version("jaxlib").startswith("0.10."):
    # Later ones end the process at a flag that they no longer have.
    QUICK_COMPILE.append("--xla_cpu_use_fusion_emitters=false")
else:
    # Kernels are dear: one for a computation that is called in several places, none in tiles, and
    # no library that plans every matrix product.
    options = "xla_cpu_flatten_after_fusion,xla_cpu_disable_tiled_emitter"
    QUICK_COMPILE += [
        f"--xla_backend_extra_options={options}",
        "--xla_cpu_experimental_ynn_fusion_type=",
    ]
