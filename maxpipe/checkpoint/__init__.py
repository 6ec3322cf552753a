"""Checkpoints: save, restore, verify, mirror to an object store."""
