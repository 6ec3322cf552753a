"""maxpipe: a YAML-configured JAX trainer for language models, built around pipeline parallelism."""

__version__ = "0.1.0"
