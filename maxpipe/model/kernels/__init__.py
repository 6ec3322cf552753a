"""Attention kernels, chosen by `model.attention`; the facts about them are in `maxpipe.config.catalog.KERNELS`.

A kernel is built for one configuration, as single-device code: `build(config, sequence_length)` ->
`AttentionFn`, and `build_engine_inputs(config, parts)` -> `PartAttention`, for queries of the
tokens parts[i], int32 [C, P]; see `maxpipe.sharding.context_parallel`. Its `unfit(config,
sequence_length, num_parts)` returns why it cannot serve, or an empty string.
"""
