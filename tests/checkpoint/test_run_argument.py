"""What commands that read a run refuse before they read its arrays."""

import pytest

from maxpipe.checkpoint.run_argument import check_variants
from maxpipe.config import Config, ConfigError
from maxpipe.config.options import update


def test_run_with_a_variant_that_is_not_imported_is_refused_with_the_flag() -> None:
    for key in ["model.block", "model.moe.router"]:
        check_variants(Config())
        with pytest.raises(
            ConfigError, match=r"the run has 'mine', which .*--import MODULE"
        ) as caught:
            check_variants(update(Config(), {key: "mine"}))
        assert [problem.key for problem in caught.value.problems] == [key]
