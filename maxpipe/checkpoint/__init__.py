"""Save, restore and verify checkpoints, and mirror them to an object store."""
