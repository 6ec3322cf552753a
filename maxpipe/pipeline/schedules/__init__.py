"""Pipeline schedules: a schedule is a table of which unit of work each stage runs in each tick. No JAX."""
