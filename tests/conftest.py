"""Runs JAX on eight simulated CPU devices."""

import os
from importlib.metadata import version

# What XLA and LLVM do to make kernels quick takes most of the time of tests and has no part in what they compare.
QUICK_COMPILE = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):  # later ones end the process at a flag that they no longer have
    QUICK_COMPILE.append("--xla_cpu_use_fusion_emitters=false")

# Before JAX is imported, and by environment variables, so that processes started by tests do the same.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILE))
os.environ.setdefault("NPROC", "64")  # see `maxpipe.mesh.start_threads`
# A program over several CPU devices that comes out of a cache can hang (see `maxpipe.mesh.start_compile_cache`).
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
