"""Data sources; each module registers `build(config: DataConfig) -> Documents`, chosen by `data.source`.

Builders list documents and read none; `maxpipe.data.documents.open_documents` splits what they list.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from maxpipe.registry import Registry

if TYPE_CHECKING:
    from maxpipe.config.sections import DataConfig
    from maxpipe.data.documents import Documents

SOURCES: "Registry[Callable[[DataConfig], Documents]]" = Registry(__name__, __path__, "data.source")
