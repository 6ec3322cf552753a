"""The catalogue is complete, light to read, and all that must know of an added variant."""

import importlib
import inspect
import pkgutil
from functools import partial

import pytest

from maxpipe.config import ConfigError, catalog, load, notes, resolve
from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, SCHEDULES, TOKENIZERS
from maxpipe.config.help import describe
from maxpipe.config.imports import implementation
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.rules.stages import engines_of

# Every table of the catalogue whose entries name an implementation, without what other tests add.
TABLES = {
    name: {key: e for key, e in table.items() if not e.implementation.startswith("helpers.")}
    for name, table in vars(catalog).items()
    if isinstance(table, dict)
    and not name.startswith("_")
    and any(hasattr(entry, "implementation") for entry in table.values())
}


def test_every_entry_has_an_implementation_and_a_summary_for_the_help():
    entries = [entry for table in TABLES.values() for entry in table.values()]
    assert [e.implementation for e in entries if not callable(implementation(e))] == []
    assert [e.implementation for e in entries if not 5 <= len(e.summary) <= 100] == []


def function_of(*parameters, returns=""):
    """Return a check for functions whose first parameters and whose result are those."""

    def is_variant(value):
        if not inspect.isfunction(value):
            return False
        signature = inspect.signature(value)
        result = getattr(signature.return_annotation, "__name__", signature.return_annotation)
        first = [*signature.parameters][: len(parameters)]
        return first == [*parameters] and result == (returns or result)

    return is_variant


def class_with(*attributes):
    """Return a check for classes that have those attributes."""
    return lambda value: inspect.isclass(value) and all(map(partial(hasattr, value), attributes))


# For each table: packages of the implementations, and which public objects there are variants.
FAMILIES = {
    "SCHEDULES": (
        "maxpipe.pipeline.schedules",
        function_of("num_stages", "num_microbatches", returns="Table"),
    ),
    "ENGINES": ("maxpipe.pipeline.engines", class_with("loss_and_gradients")),
    "OPTIMIZERS": ("maxpipe.training.optimizers", function_of("config", "specs")),
    "LR_SCHEDULES": ("maxpipe.training.lr_schedules", function_of("progress", "config")),
    "SOURCES": ("maxpipe.data.sources", function_of("config")),
    "KERNELS": ("maxpipe.model.kernels", class_with("unfit", "build")),
    "GROUPED_KERNELS": ("maxpipe.model.experts", class_with("layout", "multiply")),
    "ROUTERS": ("maxpipe.model.experts.router", function_of("logits", "config")),
    "DISPATCHES": ("maxpipe.model.experts.exchange", function_of("experts")),
    "BLOCKS": ("maxpipe.model", lambda value: getattr(value, "__name__", "").endswith("Block")),
    "TOKENIZERS": ("maxpipe.data.tokenizers", class_with("encode", "vocab_size")),
    "MODEL_TYPES": ("maxpipe.hf.families", class_with("model_type", "write")),
    "MODEL_PLACES": ("maxpipe.storage", class_with("names", "fetch")),
    "WEIGHT_FORMATS": (
        "maxpipe.hf maxpipe.migration maxpipe.training.run_weights",
        class_with("describe", "read"),
    ),
}


def modules_of(packages):
    for package in packages.split():
        module = importlib.import_module(package)
        yield module
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{package}."):
            yield importlib.import_module(info.name)


def variants_in(packages, is_variant):
    """Return "module:attribute" of the public variants that the modules of packages define."""
    return {
        f"{module.__name__}:{name}"
        for module in modules_of(packages)
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        and not getattr(value, "_is_protocol", False)
        and not inspect.isabstract(value)
        and is_variant(value)
    }


def test_tokenizers_have_as_many_ids_as_the_table_says():
    sizes = {name: implementation(entry)().vocab_size for name, entry in TOKENIZERS.items()}
    assert sizes == {name: entry.vocab_size for name, entry in TOKENIZERS.items()}


def test_variants_in_a_family_are_those_that_entries_name():
    named = {
        table: {e.implementation for e in entries.values()} for table, entries in TABLES.items()
    }
    assert {table: variants_in(*family) for table, family in FAMILIES.items()} == named


def test_unknown_name_lists_the_choices(base):
    choices = {k: o.choices for k, o in OPTIONS.items() if o.bounds.variants is not None}
    choices |= {"pipeline.schedule": [*SCHEDULES], "data.tokenizer": [*TOKENIZERS]}
    with pytest.raises(ConfigError) as error:
        load(base, [f"{key}=nonsense" for key in choices])
    messages = {problem.key: problem.message for problem in error.value.problems}
    assert [k for k, names in choices.items() if ", ".join(names) not in messages[k]] == []


@pytest.fixture
def add(monkeypatch):
    """add("SCHEDULES", name, entry): an entry that only this test has."""
    return lambda table, name, entry: monkeypatch.setitem(getattr(catalog, table), name, entry)


class TestAddedSchedule:
    ENTRY = catalog.Schedule("maxpipe.pipeline.schedules.zero_bubble:zb_h1", engines=("mpmd",))

    def test_loads_and_builds_its_table_and_is_refused_by_other_engines(
        self, add, resolved, problems
    ):
        from maxpipe.pipeline.schedules.load import build_table

        add("SCHEDULES", "mine", self.ENTRY)
        config = resolved("pipeline.schedule=mine", "pipeline.num_microbatches=4")
        assert config.pipeline.engine == "mpmd"
        assert build_table(config).num_stages == 2
        message = problems("pipeline.schedule=mine", "pipeline.engine=circular")["pipeline.engine"]
        assert "circular does not run schedule mine (mpmd does)" in message

    def test_is_proposed_for_a_misspelt_name_and_listed_in_help(self, add, problems):
        add("SCHEDULES", "patient", self.ENTRY)
        message = problems("pipeline.schedule=pateint")["pipeline.schedule"]
        assert message.endswith("did you mean patient?")
        assert "patient" in describe("pipeline.schedule")

    def test_without_a_known_engine_is_refused(self, add, problems):
        add("SCHEDULES", "mine", catalog.Schedule("module:mine", engines=("nowhere",)))
        message = problems("pipeline.schedule=mine")["pipeline.schedule"]
        assert message.startswith("no engine runs mine; choose one of circular, gpipe")
        assert "mine," not in message


class TestAddedRematPolicy:
    def test_that_offloads_is_refused_with_a_remedy_by_engines_that_cannot(self, add, problems):
        add("REMAT_POLICIES", "mine_offloaded", catalog.RematPolicy(host=("context",)))
        word = "pipeline.remat_policy=mine_offloaded"
        for schedule in ("lockstep_1f1b", "lockstep_zb"):
            message = problems(f"pipeline.schedule={schedule}", word)["pipeline.remat_policy"]
            assert message.startswith("mine_offloaded is not for the ")
            assert "use a policy that saves on the device, such as minimal, or pipe" in message
        for schedule in ("circular", "1f1b"):
            assert problems(f"pipeline.schedule={schedule}", word) == {}

    def test_that_offloads_is_refused_with_its_counterpart(self, add, problems):
        entry = catalog.RematPolicy(host=("context",), on_device="mine")
        add("REMAT_POLICIES", "mine", catalog.RematPolicy(device=("context",)))
        add("REMAT_POLICIES", "mine_offloaded", entry)
        words = ("pipeline.schedule=lockstep_1f1b", "pipeline.remat_policy=mine_offloaded")
        message = problems(*words)["pipeline.remat_policy"]
        assert "use mine, or pipeline.schedule=circular or 1f1b" in message

    def test_that_saves_nothing_is_refused_for_split_backwards(self, add, problems):
        add("REMAT_POLICIES", "mine", catalog.RematPolicy())
        words = ("pipeline.schedule=lockstep_zb", "pipeline.remat_policy=mine")
        message = problems(*words)["pipeline.remat_policy"]
        assert message.startswith("mine keeps no result of a matrix product")


class TestAddedOptimizerAndSource:
    def test_optimizer_notes_and_help_name_unused_keys(self, add, base):
        add("OPTIMIZERS", "mine", catalog.Optimizer("module:mine", moments=0, unused=("beta2",)))
        config = resolve(load(base, ["optimizer.name=mine", "optimizer.beta2=0.9"]), 4)
        assert "optimizer.beta2 has no effect with optimizer.name=mine" in notes(config)
        assert "optimizer.name=mine" in describe("optimizer.beta2")

    def test_source_without_path_refuses_a_path(self, add, problems):
        add("SOURCES", "mine", catalog.DataSource("module:mine", needs_path=False))
        message = problems("data.source=mine", "data.path=a.txt")["data.path"]
        assert message.startswith("data.source=mine reads no path")


class TestAddedEngine:
    ENTRY = catalog.Engine(
        "module:Mine",
        "a test's engine",
        unused=("skip_idle",),
        refusals=(catalog.Refusal("pipeline.skip_idle", ("true",), "it is new", "use false"),),
    )

    def test_runs_its_schedules(self, add, resolved, problems):
        add("ENGINES", "mine", self.ENTRY)
        add("SCHEDULES", "mine", catalog.Schedule("module:mine", engines=("mine",)))
        assert resolved("pipeline.schedule=mine").pipeline.engine == "mine"
        message = problems("pipeline.engine=mine", "pipeline.schedule=1f1b")["pipeline.engine"]
        assert message.endswith("it runs mine")

    def test_refusals_reach_errors_and_help(self, add, problems):
        add("ENGINES", "mine", self.ENTRY)
        add("SCHEDULES", "mine", catalog.Schedule("module:mine", engines=("mine",)))
        message = problems("pipeline.schedule=mine", "pipeline.skip_idle=true")[
            "pipeline.skip_idle"
        ]
        assert message == "true is not for the mine engine: it is new; use false"
        assert "mine refuses true: it is new" in describe("pipeline.skip_idle")


# A value of each key that is not its default, with what it needs.
VALUES = {
    "num_microbatches": ["pipeline.num_microbatches=4"],
    "num_repeats": ["pipeline.num_repeats=1"],
    "num_layers_per_stage": ["pipeline.num_layers_per_stage=1"],
    "layers_per_stage": ["pipeline.layers_per_stage=[2,2,2,2]"],
    "unit_times": ["pipeline.unit_times=[1,1.4,0.9]"],
    "memory_limit_gib": ["pipeline.memory_limit_gib=8"],
    "parallel_layers": ["pipeline.parallel_layers=4"],
    "outside_layers": ["pipeline.outside_layers=before", "pipeline.parallel_layers=4"],
    "delay_activation_forwarding": ["pipeline.delay_activation_forwarding=true"],
    "overlap_slots": ["pipeline.overlap_slots=true"],
    "skip_idle": ["pipeline.skip_idle=true"],
    "fsdp_gather": ["pipeline.fsdp_gather=once"],
    "fsdp_prefetch": ["pipeline.fsdp_prefetch=true"],
    "scan_iterations": ["pipeline.scan_iterations=false"],
    "scan_repeats": ["pipeline.scan_repeats=false", "pipeline.fsdp_gather=once"],
    "scan_layers": ["pipeline.scan_layers=false"],
    "scan_layers_per_stage": ["pipeline.scan_layers_per_stage=true"],
    "remat_policy": ["pipeline.remat_policy=minimal"],
    "remat_cheap": ["pipeline.remat_cheap=false"],
    "remat_iterations": ["pipeline.remat_iterations=false"],
    "remat_layers": ["pipeline.remat_layers=true"],
    "remat_tensors": ["pipeline.remat_policy=custom", "pipeline.remat_tensors.context=device"],
}
ENGINE_WORDS = {
    "sequential": ["mesh.ici.stage=1", "mesh.ici.fsdp=4"],
    "circular": ["pipeline.schedule=circular"],
    "scheduled": ["pipeline.schedule=lockstep_1f1b"],
    "mpmd": ["pipeline.schedule=interleaved_1f1b"],
}


class TestEngines:
    def test_every_schedule_has_an_engine(self):
        assert all(engines_of(name) for name in [*SCHEDULES, "file.csv"])
        assert {engine for facts in SCHEDULES.values() for engine in facts.engines} <= {*ENGINES}

    def test_keys_of_facts_exist(self):
        for engine in ENGINES.values():
            assert {f"pipeline.{key}" for key in engine.unused} <= {*OPTIONS}
            assert {refusal.key for refusal in engine.refusals} <= {*OPTIONS}
        policies = {policy.on_device for policy in REMAT_POLICIES.values()} - {""}
        assert policies <= {*REMAT_POLICIES}

    def test_every_pipeline_key_has_an_engine(self):
        keys = [key for key in OPTIONS if key.startswith("pipeline.")]
        assert [key for key in keys if not any(e.takes(key) for e in ENGINES.values())] == []
        names = {key.split(".")[1] for key in keys}
        assert {*VALUES} == names - {"engine", "schedule"}

    def test_unused_is_what_rules_refuse_and_notes_call_without_effect(self, base):
        def is_read(name, engine):
            try:
                loaded = load(base, [*ENGINE_WORDS[engine], *VALUES[name]])
                config = resolve(loaded, 4)
            except ConfigError as error:
                return {problem.key.partition(".")[0] for problem in error.problems} != {"pipeline"}
            assert get(config, "pipeline.engine") == engine
            lines = [line.partition(" no effect") for line in notes(config, loaded)]
            return not any(
                f"pipeline.{name}" in named for named, no_effect, _ in lines if no_effect
            )

        takes = {(key, e): ENGINES[e].takes(f"pipeline.{key}") for key in VALUES for e in ENGINES}
        # With layers_per_stage=auto, and with the schedules that follow times
        takes |= {("memory_limit_gib", "mpmd"): False, ("unit_times", "mpmd"): False}
        assert {case: is_read(*case) for case in takes} == takes

    def test_help_names_the_engines_that_take_a_key(self):
        keys = [f"pipeline.{name}" for name in VALUES if name != "remat_tensors"]
        named = {
            key: {name.strip() for name in line.split("engines")[1].split(",")}
            for key in keys
            for line in describe(key).splitlines()
            if "  engines " in line
        }
        assert named == {k: {e for e, facts in ENGINES.items() if facts.takes(k)} for k in keys}
