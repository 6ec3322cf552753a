"""Translate config.json of each model type; `maxpipe.config.catalog.MODEL_TYPES` lists the types.

A type is a subclass of `maxpipe.hf.family.Family`.
"""
