"""Text from a trained model: sampling, decoding with a cache, the body of the command."""
