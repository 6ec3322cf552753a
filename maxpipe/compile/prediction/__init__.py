"""Predict the time of a compiled TPU step from the compiler's own estimates, without a chip."""
