"""Report what a run does: console, metrics.jsonl, TensorBoard, account of time, traces."""
