"""Save, restore, verify: what lies in a run directory and who may go on from it."""
