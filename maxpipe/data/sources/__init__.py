"""Data sources, chosen by `data.source`; the facts about them are in `maxpipe.config.catalog.SOURCES`.

A source is a function `build(config: DataConfig) -> Documents`. It finds out how many documents
there are; their contents are read when asked for. Splitting them into training and evaluation is
left to `maxpipe.data.documents.open_documents`.
"""
