"""Serve notebooks and scripts: runs, configurations and schedules of `import maxpipe`."""
