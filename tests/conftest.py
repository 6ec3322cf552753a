"""Runs JAX on eight simulated CPU devices."""

import os

# Before JAX is imported, and by environment variables, so that processes started by tests do the same.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# As `engines.QUICK_COMPILE`, for all programs.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
# A program over several CPU devices that comes out of a cache can hang (see `maxpipe.mesh.start_compile_cache`).
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
