"""Compare runs by what they have written: figures, differences of configuration, curves, sweeps."""
