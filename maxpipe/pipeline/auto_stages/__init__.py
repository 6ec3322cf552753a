"""`pipeline.layers_per_stage: auto`: how many layers each stage of the MPMD engine gets; imports no JAX."""
