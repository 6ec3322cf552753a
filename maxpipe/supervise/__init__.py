"""Keep a process in hand (signals, watchdog, failure) and a run going (supervisor, council)."""
