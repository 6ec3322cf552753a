"""Generate text with a trained model: sampling, decoding with a cache, the command's body."""
