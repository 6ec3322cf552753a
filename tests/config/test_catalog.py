"""The catalogue is complete, light to read, and all that must know of an added variant."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

from maxpipe.config import ConfigError, catalog, load, notes, resolve
from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, SCHEDULES, TOKENIZERS
from maxpipe.config.help import describe
from maxpipe.config.imports import implementation
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.rules.stages import engines_of

# Every table of the catalogue whose entries name an implementation.
TABLES = {
    name: table
    for name, table in vars(catalog).items()
    if isinstance(table, dict)
    and not name.startswith("_")
    and any(hasattr(entry, "implementation") for entry in table.values())
}
ENTRIES = [(table, name) for table, entries in TABLES.items() for name in entries]


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_entry_implementation_is_callable(table, name):
    assert callable(implementation(TABLES[table][name])), f"{table}[{name!r}]"


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_entry_has_a_summary_for_the_help(table, name):
    assert 5 <= len(TABLES[table][name].summary) <= 100


def parameters_of(value):
    return [*inspect.signature(value).parameters]


def returns(value, name):
    annotation = inspect.signature(value).return_annotation
    return getattr(annotation, "__name__", annotation) == name


def is_schedule(value):
    return (
        inspect.isfunction(value)
        and parameters_of(value)[:2] == ["num_stages", "num_microbatches"]
        and returns(value, "Table")
    )


def is_engine(value):
    return (
        inspect.isclass(value)
        and not inspect.isabstract(value)
        and callable(getattr(value, "loss_and_gradients", None))
    )


def is_optimizer(value):
    return inspect.isfunction(value) and parameters_of(value) == ["config", "specs"]


def is_lr_schedule(value):
    return inspect.isfunction(value) and parameters_of(value) == ["progress", "config"]


def is_source(value):
    return inspect.isfunction(value) and parameters_of(value) == ["config"]


def is_kernel(value):
    return inspect.isclass(value) and hasattr(value, "unfit") and hasattr(value, "build")


def is_grouped_kernel(value):
    return inspect.isclass(value) and hasattr(value, "layout") and hasattr(value, "multiply")


def is_router(value):
    return inspect.isfunction(value) and parameters_of(value)[:2] == ["logits", "config"]


def is_dispatch(value):
    return inspect.isfunction(value) and parameters_of(value) == ["experts"]


def is_block(value):
    return inspect.isclass(value) and value.__name__.endswith("Block")


def is_tokenizer(value):
    return inspect.isclass(value) and hasattr(value, "encode") and not parameters_of(value)


def is_model_type(value):
    return inspect.isclass(value) and hasattr(value, "model_type") and hasattr(value, "write")


def is_model_place(value):
    return inspect.isclass(value) and hasattr(value, "names") and hasattr(value, "fetch")


def is_weight_format(value):
    return (
        inspect.isclass(value)
        and hasattr(value, "describe")
        and hasattr(value, "read")
        and parameters_of(value)[:1] == ["config"]
    )


# For each table: packages of the implementations, and which public objects there are variants.
FAMILIES = {
    "SCHEDULES": ("maxpipe.pipeline.schedules", is_schedule),
    "ENGINES": ("maxpipe.pipeline.engines", is_engine),
    "OPTIMIZERS": ("maxpipe.training.optimizers", is_optimizer),
    "LR_SCHEDULES": ("maxpipe.training.lr_schedules", is_lr_schedule),
    "SOURCES": ("maxpipe.data.sources", is_source),
    "KERNELS": ("maxpipe.model.kernels", is_kernel),
    "GROUPED_KERNELS": ("maxpipe.model.experts", is_grouped_kernel),
    "ROUTERS": ("maxpipe.model.experts.router", is_router),
    "DISPATCHES": ("maxpipe.model.experts.exchange", is_dispatch),
    "BLOCKS": ("maxpipe.model", is_block),
    "TOKENIZERS": ("maxpipe.data.tokenizers", is_tokenizer),
    "MODEL_TYPES": ("maxpipe.hf.families", is_model_type),
    "MODEL_PLACES": ("maxpipe.storage", is_model_place),
    "WEIGHT_FORMATS": (
        "maxpipe.hf maxpipe.migration maxpipe.training.run_weights",
        is_weight_format,
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


def missing_entries(table):
    """Return the variants in a table's modules that no entry names."""
    return variants_in(*FAMILIES[table]) - {
        entry.implementation for entry in TABLES[table].values()
    }


def test_tokenizers_have_as_many_ids_as_the_table_says():
    sizes = {name: implementation(entry)().vocab_size for name, entry in TOKENIZERS.items()}
    assert sizes == {name: entry.vocab_size for name, entry in TOKENIZERS.items()}


def test_every_table_has_a_family():
    assert FAMILIES.keys() == TABLES.keys()


@pytest.mark.parametrize("table", TABLES)
def test_variant_in_a_family_has_an_entry(table):
    assert missing_entries(table) == set()


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_variant_without_entry_is_named(table, name, monkeypatch):
    entry = TABLES[table][name]
    monkeypatch.delitem(TABLES[table], name)
    assert entry.implementation in missing_entries(table)


def test_reading_the_catalogue_imports_no_heavy_library():
    code = (
        "import sys\n"
        "from maxpipe.config import load, notes, print_config, resolve\n"
        "from maxpipe.config.help import describe\n"
        "from maxpipe.config.options import OPTIONS\n"
        "[(option.choices, describe(key)) for key, option in OPTIONS.items()]\n"
        "loaded = load('configs/base.yml', ['seed=${steps}'])\n"
        "notes(resolve(loaded, 4), loaded), print_config(loaded)\n"
        "libraries = {'jax', 'numpy', 'flax', 'optax', 'orbax', 'grain'} & set(sys.modules)\n"
        "assert not libraries, libraries\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


KEYS = [key for key, option in OPTIONS.items() if option.bounds.variants is not None]


@pytest.mark.parametrize("key", [*KEYS, "pipeline.schedule", "data.tokenizer"])
def test_unknown_name_lists_the_choices(base, key):
    names = OPTIONS[key].choices or [*(SCHEDULES if key == "pipeline.schedule" else TOKENIZERS)]
    with pytest.raises(ConfigError) as error:
        load(base, [f"{key}=nonsense"])
    (problem,) = [problem for problem in error.value.problems if problem.key == key]
    assert ", ".join(names) in problem.message


@pytest.fixture
def add(monkeypatch):
    """add("SCHEDULES", name, entry): an entry that only this test has."""
    return lambda table, name, entry: monkeypatch.setitem(getattr(catalog, table), name, entry)


class TestAddedSchedule:
    ENTRY = catalog.Schedule("maxpipe.pipeline.schedules.zero_bubble:zb_h1", engines=("mpmd",))

    def test_loads_and_builds_its_table(self, add, resolved):
        from maxpipe.pipeline.schedules.load import build_table

        add("SCHEDULES", "mine", self.ENTRY)
        config = resolved("pipeline.schedule=mine", "pipeline.num_microbatches=4")
        assert config.pipeline.engine == "mpmd"
        assert build_table(config).num_stages == 2

    def test_is_refused_by_other_engines(self, add, problems):
        add("SCHEDULES", "mine", self.ENTRY)
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
    @pytest.mark.parametrize("schedule", ["lockstep_1f1b", "lockstep_zb"])
    def test_that_offloads_is_refused_with_a_remedy(self, add, problems, schedule):
        add("REMAT_POLICIES", "mine_offloaded", catalog.RematPolicy(host=("context",)))
        words = (f"pipeline.schedule={schedule}", "pipeline.remat_policy=mine_offloaded")
        message = problems(*words)["pipeline.remat_policy"]
        assert message.startswith("mine_offloaded is not for the ")
        assert "use a policy that saves on the device, such as minimal, or pipeline.sch" in message

    def test_that_offloads_is_refused_with_its_counterpart(self, add, problems):
        entry = catalog.RematPolicy(host=("context",), on_device="mine")
        add("REMAT_POLICIES", "mine", catalog.RematPolicy(device=("context",)))
        add("REMAT_POLICIES", "mine_offloaded", entry)
        words = ("pipeline.schedule=lockstep_1f1b", "pipeline.remat_policy=mine_offloaded")
        message = problems(*words)["pipeline.remat_policy"]
        assert message.endswith(
            "use mine, or pipeline.schedule=circular or 1f1b, whose engines offload"
        )

    @pytest.mark.parametrize("schedule", ["circular", "1f1b"])
    def test_loads_on_an_engine_that_takes_it(self, add, resolved, schedule):
        add("REMAT_POLICIES", "mine_offloaded", catalog.RematPolicy(host=("context",)))
        words = (f"pipeline.schedule={schedule}", "pipeline.remat_policy=mine_offloaded")
        assert resolved(*words).pipeline.remat_policy == "mine_offloaded"

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

    @pytest.mark.parametrize("engine", ENGINE_WORDS)
    @pytest.mark.parametrize("name", VALUES)
    def test_unused_is_what_rules_refuse_and_notes_call_without_effect(self, base, name, engine):
        key = f"pipeline.{name}"
        try:
            loaded = load(base, [*ENGINE_WORDS[engine], *VALUES[name]])
            config = resolve(loaded, 4)
        except ConfigError as error:
            is_read = {problem.key.partition(".")[0] for problem in error.problems} != {"pipeline"}
        else:
            assert get(config, "pipeline.engine") == engine
            lines = [line for line in notes(config, loaded) if "has no effect" in line]
            lines += [line for line in notes(config, loaded) if "have no effect" in line]
            is_read = not any(key in line.partition(" no effect")[0] for line in lines)
        if name in ("memory_limit_gib", "unit_times") and engine == "mpmd":
            is_read = True  # with layers_per_stage=auto, and with the schedules that follow times
        assert is_read == ENGINES[engine].takes(key)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_help_names_the_engines_that_take_a_key(self, engine):
        keys = [
            key for key in OPTIONS if key.startswith("pipeline.") and "remat_tensors" not in key
        ]
        for key in keys[2:]:
            (line,) = [line for line in describe(key).splitlines() if "  engines " in line]
            assert (engine in line.split("engines")[1].replace(",", " ").split()) == ENGINES[
                engine
            ].takes(key)
