"""List all rules across keys, in the order in which they run.

Rules that derive a value come before the rules that read it. The mesh is fitted to the devices
before any of them (`rules.mesh`).
"""

from maxpipe.config.rules.engines import ENGINE_RULES
from maxpipe.config.rules.layout import LAYOUT_RULES
from maxpipe.config.rules.model import MODEL_RULES
from maxpipe.config.rules.rule import Rule
from maxpipe.config.rules.run import RUN_RULES

RULES: tuple[Rule, ...] = (*RUN_RULES, *MODEL_RULES, *LAYOUT_RULES, *ENGINE_RULES)

__all__ = ["RULES"]
