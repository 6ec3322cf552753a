"""The MPMD engine: one traced program cut at stage marks into separate programs for the stages' own devices."""
