"""Define attention kernels, one of which `model.attention` names.

`maxpipe.config.catalog.KERNELS` has their facts. A kernel is a class of three functions,
single-device code for one configuration:

    unfit(config, sequence_length, num_parts)  why it cannot serve, or an empty string
    build(config, sequence_length)             `AttentionFn`, of all queries
    build_for_parts(config, parts)             `PartAttention`, of the queries of tokens parts[i],
                                               int32 [C, P]; see `maxpipe.sharding.context_parallel`
"""
