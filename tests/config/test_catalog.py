"""The catalogue is complete, light to read, and all that must know of an added variant."""

import pytest

from maxpipe.config import ConfigError, catalog, load
from maxpipe.config.catalog import SCHEDULES, TOKENIZERS
from maxpipe.config.imports import implementation
from maxpipe.config.options import OPTIONS

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


def test_tokenizers_have_as_many_ids_as_the_table_says():
    sizes = {name: implementation(entry)().vocab_size for name, entry in TOKENIZERS.items()}
    assert sizes == {name: entry.vocab_size for name, entry in TOKENIZERS.items()}


def test_unknown_name_lists_the_choices(base):
    choices = {k: o.choices for k, o in OPTIONS.items() if o.bounds.variants is not None}
    choices |= {"pipeline.schedule": [*SCHEDULES], "data.tokenizer": [*TOKENIZERS]}
    with pytest.raises(ConfigError) as error:
        load(base, [f"{key}=nonsense" for key in choices])
    messages = {problem.key: problem.message for problem in error.value.problems}
    assert [k for k, names in choices.items() if ", ".join(names) not in messages[k]] == []


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
