"""Pipeline schedules; each module registers one generator of a table, chosen by `pipeline.schedule`."""

from maxpipe.registry import Registry

SCHEDULES: Registry = Registry(__name__, __path__, "pipeline.schedule")
