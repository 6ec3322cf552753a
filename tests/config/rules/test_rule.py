"""Every rule that is declared runs."""

import importlib
import pkgutil

from maxpipe.config import rules
from maxpipe.config.rules.rule import Rule

BEFORE_ALL = {"check_unknown_axes"}  # run by `load` before the list


def test_no_rule_is_left_out_of_the_list():
    declared = {
        name: value
        for module in pkgutil.iter_modules(rules.__path__)
        for name, value in vars(importlib.import_module(f"{rules.__name__}.{module.name}")).items()
        if isinstance(value, Rule)
    }
    listed = {id(rule) for rule in rules.RULES}
    assert len(declared) > 40
    assert {name for name, rule in declared.items() if id(rule) not in listed} == BEFORE_ALL
