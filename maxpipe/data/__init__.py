"""Turn files into batches: sources, documents, tokenizers, order, mixture, packing, loader."""
