"""Provide the Python interface of `import maxpipe`: runs, configurations and schedules."""
