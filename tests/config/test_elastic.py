"""Configurations for fewer hosts: smaller axes, the same batch, and what is refused."""

import pytest

from maxpipe.config import ConfigError, load, resolve
from maxpipe.config.elastic import Hosts, counts_to_go_on, fit_fewer

SEQUENTIAL = ("mesh.ici.stage=1", "mesh.ici.fsdp=1")


@pytest.fixture
def fewer(base):
    """fewer("key=value", ..., hosts=Hosts) -> {processes: resolved config} that can go on."""

    def _fewer(*words, hosts):
        loaded = load(base, words)
        configs = {}
        for count in counts_to_go_on(loaded, hosts):
            now = hosts.fewer(count)
            configs[count] = resolve(fit_fewer(loaded, hosts, now), now.devices, now.slices)
        return configs

    return _fewer


def shape(config):
    sizes = [config.mesh.size(axis) for axis in ("data", "fsdp", "stage")]
    return (*sizes, config.pipeline.num_microbatches)


def test_fit_fewer_shrinks_elastic_axes_and_accumulates_more(fewer):
    alone, data = " ".join(SEQUENTIAL), "mesh.elastic.axes=[data]"
    table = {  # (words, hosts): shape by number of processes
        (f"{alone} mesh.ici.data=4 {data}", Hosts(4, 4)): {1: (1, 1, 1, 4), 2: (2, 1, 1, 2)},
        (f"{alone} mesh.ici.data=-1 {data}", Hosts(2, 8)): {1: (4, 1, 1, 2)},
        (f"{alone} mesh.ici.data=4 {data} data.global_batch_size=24", Hosts(4, 4)): {
            1: (1, 1, 1, 4),
            2: (2, 1, 1, 2),
            3: (3, 1, 1, 2),
        },
        # Stages stay, and the pipeline gets more microbatches, in whole rounds.
        ("mesh.elastic.axes=[fsdp] pipeline.schedule=circular", Hosts(4, 4)): {2: (1, 1, 2, 4)},
        # The first axis shrinks first.
        ("mesh.ici.data=2 mesh.elastic.axes=[data,fsdp]", Hosts(8, 8)): {
            2: (1, 1, 2, 8),
            4: (1, 2, 2, 4),
        },
        (f"mesh.dcn.data=4 {data}", Hosts(4, 16, 4)): {1: (1, 2, 2, 8), 2: (2, 2, 2, 4)},
    }
    configs = {case: fewer(*case[0].split(), hosts=case[1]) for case in table}
    shapes = {case: {n: shape(c) for n, c in by.items()} for case, by in configs.items()}
    assert shapes == table
    sizes = [{c.data.global_batch_size for c in by.values()} for by in configs.values()]
    assert sizes == [{16}, {16}, {24}, {16}, {16}, {16}]


def test_fit_fewer_says_what_has_changed_and_why(base):
    loaded = load(base, [*SEQUENTIAL, "mesh.ici.data=4", "mesh.elastic.axes=[data]"])
    assert fit_fewer(loaded, Hosts(4, 4), Hosts(2, 2)).remarks == (
        "mesh.ici.data=2,pipeline.num_microbatches=2: 2 of 4 processes go on (mesh.elastic.axes); "
        "the batch stays 16 rows",
    )


def test_fit_fewer_of_processes_that_do_not_fit_is_refused(base):
    loaded = load(base, [*SEQUENTIAL, "mesh.ici.data=4", "mesh.elastic.axes=[data]"])
    with pytest.raises(ConfigError, match=r"^mesh\.elastic\.axes: 3 of 4 processes cannot"):
        fit_fewer(loaded, Hosts(4, 4), Hosts(3, 3))


def test_counts_to_go_on_of_the_mpmd_engine_keep_stages_in_whole_processes(base):
    words = ("pipeline.engine=mpmd", "pipeline.schedule=1f1b", "mesh.elastic.axes=[fsdp]")
    words += ("mesh.ici.fsdp=4", "pipeline.num_repeats=1", "pipeline.num_microbatches=4")
    assert counts_to_go_on(load(base, words), Hosts(8, 8)) == [2, 4]


def test_counts_to_go_on_refuses_axes_that_no_lost_host_can_shrink(base):
    for axis, hosts in (("ici.data=1", Hosts(4, 4)), ("dcn.data=2", Hosts(4, 8, 2))):
        with pytest.raises(
            ConfigError, match=r"^mesh\.elastic\.axes: data=\d cannot shrink by whole"
        ):
            counts_to_go_on(load(base, [f"mesh.{axis}", "mesh.elastic.axes=[data]"]), hosts)
