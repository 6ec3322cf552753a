"""What a run reports: console, metrics.jsonl, TensorBoard, account of time, profiler traces."""
