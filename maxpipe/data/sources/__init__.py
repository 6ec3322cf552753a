"""Read documents from a `data.source`; `maxpipe.config.catalog.SOURCES` holds the facts.

A source is a function of `data.*` that returns `maxpipe.data.documents.Documents`. It finds out how
many documents there are, and reads their contents on access.
"""
