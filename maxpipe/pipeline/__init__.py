"""Run a model over pipeline stages: schedules, engines, and what the engines share.

Letters, here and in the packages below; suffixes of names give shapes, as in `x_SBTD`:

    S  stages                          B  sequences of a microbatch (of a batch where said)
    V  repeats (chunks per stage)      T  tokens of a sequence
    M  microbatches of a batch         D  embed, the width of activations
    L  layers per stage and repeat,    H  query heads
       the largest if uneven           N  layers of the model
    K  = M / S, slots of the circular  E  rows of live layer parameters for layers outside
       engine's conveyor                  the pipeline
    d  forwarding delay, 1 or 2        F, B, I, W  units of a schedule: forward, backward, and
    t  iteration or tick                  the backward's input and weight gradients

Chunk v S + s is what stage s computes in repeat v (loop placement). A unit is one microbatch in one
chunk. Live layer parameters are [V + E, S, L, ...], on disk they are [N, ...].
"""
