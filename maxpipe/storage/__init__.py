"""Read and write files wherever they are: object stores, and local copies where needed."""
