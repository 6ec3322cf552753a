"""What a run tells about itself: start report, console, metrics.jsonl, TensorBoard, MFU, profiler traces."""
