"""Train language models from YAML in JAX, built around pipeline parallelism."""

__version__ = "0.1.0"
