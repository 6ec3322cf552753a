"""What a run tells about itself: start report, console, metrics.jsonl, TensorBoard, MFU, traces, time, hangs."""
