"""Conversations about Python's standard library."""

import textwrap

from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import MarkedText, open_documents


def test_python_help_answers_with_docstring_and_arguments() -> None:
    config = DataConfig(source="python_help", chat_template="chatml", eval_fraction=0)
    documents = open_documents(config, "train")
    assert len(documents) > 300
    texts = [documents[i] for i in range(len(documents))]
    assert all(isinstance(text, MarkedText) for text in texts)
    about = next(text for text in texts if "textwrap.dedent do?" in text.text)
    answers = [about.text[start:end] for start, end in about.spans]
    assert textwrap.dedent.__doc__ is not None
    first = textwrap.dedent.__doc__.partition("\n\n")[0].strip()
    assert answers == [f"{first}<|im_end|>\n", "text<|im_end|>\n"]
