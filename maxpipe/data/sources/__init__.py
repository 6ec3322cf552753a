"""Data sources; each module registers `build(config: DataConfig) -> Documents`, chosen by `data.source`.

A builder finds out how many documents there are; their contents are read when asked for. Splitting them into
training and evaluation is left to `maxpipe.data.documents.open_documents`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from maxpipe.registry import Registry

if TYPE_CHECKING:
    from maxpipe.config.sections import DataConfig
    from maxpipe.data.documents import Documents

SOURCES: "Registry[Callable[[DataConfig], Documents]]" = Registry(__name__, __path__, "data.source")
