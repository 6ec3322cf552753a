"""Open the documents of a source as a run does."""

import pickle
from typing import Any

from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents, Split, open_documents


def opened(source: str, path: object = "", split: Split = "train", **keys: Any) -> Documents:
    """Return the documents of a split, all of them by default, pickled as for a worker process."""
    config = DataConfig(source=source, path=str(path), **{"eval_fraction": 0.0, **keys})
    documents: Documents = pickle.loads(pickle.dumps(open_documents(config, split)))
    return documents


def all_of(documents: Documents) -> list[Any]:
    return [documents[i] for i in range(len(documents))]
