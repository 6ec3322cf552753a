"""Values of --fix and --try that leave nothing to search are named, with those that would."""

from maxpipe.config import Config, replace
from maxpipe.plan.search.flags import emptiness, emptying, is_empty
from maxpipe.plan.search.space import Space

CONFIG = replace(Config(), **{"model.num_layers": 8, "model.num_kv_heads": 4})
ENGINE, SCHEDULE, REPEATS = "pipeline.engine", "pipeline.schedule", "pipeline.num_repeats"


def space_of(choices, fixed=(), devices=4, slices=1, hosts=1):
    return Space(CONFIG, devices, slices, choices, fixed=fixed, hosts=hosts)


def test_a_space_of_legal_values_is_not_empty():
    assert not is_empty(space_of({}))
    assert not is_empty(space_of({"mesh.ici.stage": [3, 2], SCHEDULE: ["gpipe"]}))


def test_emptying_names_the_fewest_keys_that_leave_nothing():
    for choices, keys in (
        ({"mesh.ici.fsdp": [2], "mesh.ici.stage": [3]}, ["mesh.ici.stage"]),
        ({"mesh.ici.fsdp": [4], "mesh.ici.stage": [2]}, ["mesh.ici.fsdp", "mesh.ici.stage"]),
        (
            {
                ENGINE: ["sequential"],
                "pipeline.remat_policy": ["full"],
                "mesh.ici.data": [2],
                "mesh.ici.stage": [2],
            },
            [ENGINE, "mesh.ici.stage"],
        ),
        (
            {"mesh.ici.data": [1], "mesh.ici.stage": [2], SCHEDULE: ["gpipe"], REPEATS: [2]},
            ["mesh.ici.stage", SCHEDULE, REPEATS],
        ),
    ):
        space = space_of(choices)
        assert is_empty(space), (choices, keys)
        assert emptying(space) == keys, (choices, keys)


def test_emptiness_says_what_contradicts_what():
    on_two_hosts = "; mpmd is priced on one host only, without transfers between 2 hosts"
    for choices, ends in (
        ({ENGINE: ["mpmd"]}, on_two_hosts),
        ({SCHEDULE: ["1f1b", "zb_v"]}, on_two_hosts),
        ({"mesh.ici.tensor": [3]}, "for 16 devices; it must divide 8 devices of a slice; legal "),
        ({"mesh.ici.tensor": [3]}, "legal here: 1, 2, 4"),  # 8 devices, but 4 heads
        ({"mesh.dcn.data": [3]}, "it must divide 2 slices; legal here: 1, 2"),
        (
            {"mesh.ici.fsdp": [8], "mesh.ici.stage": [2]},
            "the sizes of all axes together make 8 devices of a slice",
        ),
        ({ENGINE: ["sequential"], "mesh.ici.stage": [2]}, "; sequential has no stages"),
        ({ENGINE: ["mpmd"], SCHEDULE: ["lockstep_1f1b"]}, "; lockstep_1f1b runs on scheduled; "),
        ({ENGINE: ["mpmd"], SCHEDULE: ["lockstep_1f1b"]}, "mpmd runs gpipe, 1f1b, "),
        (
            {"mesh.ici.stage": [2], SCHEDULE: ["gpipe"], REPEATS: [2]},
            "; gpipe has pipeline.num_repeats=1",
        ),
    ):
        hosts = 2 if ends is on_two_hosts else 1
        fixed = (*choices,)[:1]
        message = emptiness(space_of(choices, fixed, devices=16, slices=2, hosts=hosts)).message
        first = next(iter(choices))
        values = ",".join(map(str, choices[first]))
        assert message.startswith(f"--fix {first}={values} "), (choices, ends)
        assert ends in message, (choices, ends)
        assert message.count("--try ") == len(choices) - 1, (choices, ends)
