"""Pictures of simulated schedules: terminal, SVG and a self-contained HTML page."""
