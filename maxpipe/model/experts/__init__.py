"""Compute a mixture of experts (Shazeer et al. 2017), dropless, with FLOPs for chosen experts only.

The path of a token from `mixture`, the layer:

    router     float32 logits, choice of k experts and their weights; losses that spread the load
    dispatch   rows of tokens in the order of their experts, and back
    blocks, megablox    kernels: products of such rows with the weights of their experts
    exchange   the same for experts of several devices: tokens go there, and results back
    split      the same for arrays that are split over devices, and the choice of the kernel

`maxpipe.config.catalog.GROUPED_KERNELS` has the facts of the kernels. A kernel is a class of three
functions:

    unfit(config)                                 why it cannot serve, or an empty string
    layout(num_assignments, num_experts, most)    `Layout` of the rows, for so many expected
                                                  assignments and no more than `most`
    multiply(rows, weights, places, layout)       rows [P, D] times weights [E, D, F] -> [P, F]

Letters: N tokens, k experts of a token, A = N k assignments of a token to an expert, P rows, E
experts, D embed, F hidden width of an expert.
"""
