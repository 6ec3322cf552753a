"""Build schedules: tables of the unit of work that each stage runs in each tick. No JAX."""
