"""From files to batches: sources, documents, tokenizers, order and mixture, packing, loader."""
