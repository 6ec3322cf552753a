"""Files wherever they are: object stores, and local copies of what cannot be read in place."""
