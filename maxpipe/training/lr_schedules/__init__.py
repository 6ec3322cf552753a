"""Learning-rate schedules; each module registers one, chosen by `optimizer.schedule`."""

from maxpipe.registry import Registry

LR_SCHEDULES: Registry = Registry(__name__, __path__, "optimizer.schedule")
