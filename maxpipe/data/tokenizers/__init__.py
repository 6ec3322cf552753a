"""Tokenizers; each module registers one, chosen by `data.tokenizer`."""

from maxpipe.registry import Registry

TOKENIZERS: Registry = Registry(__name__, __path__, "data.tokenizer")
