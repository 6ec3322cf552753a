"""Conversations in JSON lines and parquet files."""

import gzip
import json
import pickle
import textwrap
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import BadDocument, MarkedText, open_documents
from maxpipe.data.sources.chat import parse

CALL = [{"function": {"name": "f", "arguments": {"x": 1}}}]
TALKS = [
    {"messages": [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "漢"}]},
    {"messages": [{"role": "assistant", "content": "a\nb", "name": "n"}], "source": "elsewhere"},
]


def _config(path, **keys):
    keys = {"chat_template": "chatml", "cache_dir": str(path.parent / "cache"), **keys}
    return DataConfig(source="chat", path=str(path), eval_fraction=0, **keys)


def _texts(config):
    documents = pickle.loads(pickle.dumps(open_documents(config, "train")))
    texts = [documents[i] for i in range(len(documents))]
    assert all(isinstance(text, MarkedText) and text.spans for text in texts)
    return [text.text for text in texts]


EXPECTED = [
    "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n漢<|im_end|>\n",
    "<|im_start|>assistant\na\nb<|im_end|>\n",
]


def test_chat_reads_conversations_of_every_kind_of_file(tmp_path):
    lines = "".join(json.dumps(talk) + "\n" for talk in TALKS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.Table.from_pylist(TALKS), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert _texts(_config(tmp_path / name, cache_dir=str(tmp_path / "cache"))) == EXPECTED


def test_nulls_within_fields_of_json_lines_stay():
    call = [{"function": {"name": "f", "arguments": {"unit": None, "a": [None, 1]}}}]
    tools = [{"name": "f", "parameters": {"unit": {"default": None}}}]
    message = {"role": "assistant", "tool_calls": call}
    talk = {"messages": [{**message, "content": None, "name": None}], "tools": tools}
    assert parse(json.dumps(talk).encode()) == ([message], tools)


def test_parquet_does_not_invent_fields_that_a_message_lacks(tmp_path):
    messages = [{"role": "assistant", "tool_calls": CALL}]
    talk = {"messages": messages, "tools": [{"name": "f"}]}
    rows = [talk, {"messages": [{"role": "assistant", "content": "b"}], "tools": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    template = tmp_path / "all.jinja"
    template.write_text(
        "{{ tools | tojson }}{% generation %}{{ messages | tojson }}{% endgeneration %}"
    )
    texts = _texts(_config(tmp_path, chat_template=str(template)))
    assert json.loads(texts[0].removeprefix('[{"name": "f"}]')) == messages
    assert json.loads(texts[1].removeprefix("null")) == rows[1]["messages"]


def test_tokenizer_that_cannot_encode_conversations_is_refused_at_once(tmp_path):
    for source in ["chat", "python_help"]:
        (tmp_path / "a.jsonl").write_text(json.dumps(TALKS[0]))
        config = replace(_config(tmp_path, tokenizer="ids:300"), source=source)
        with pytest.raises(ConfigError, match=r"^data\.tokenizer: does not tell which characters"):
            open_documents(config, "train")


def test_line_without_conversation_is_a_bad_document():
    for line in [
        b"{",
        b'{"messages": "hello"}',
        b'{"messages": [{"content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}',
    ]:
        with pytest.raises(BadDocument, match="not a JSON object with a list of"):
            parse(line)


def test_bad_conversation_is_named_with_its_line_or_row(tmp_path):
    only_asks = {"messages": [{"role": "user", "content": "a"}]}
    twice = {"messages": TALKS[0]["messages"] * 2}  # turns that change when others follow
    (tmp_path / "last.jinja").write_text(
        "{% for m in messages %}{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}.{% endif %}{% endfor %}"
    )
    lines = "\n\n".join(json.dumps(line) for line in (TALKS[0], {}, only_asks, twice))
    pq.write_table(pa.Table.from_pylist([TALKS[0], only_asks]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    config = _config(tmp_path, chat_template=str(tmp_path / "last.jinja"))
    documents = open_documents(config, "train")
    for index, kind, message in (
        (1, BadDocument, rf"^data\.path: {tmp_path}/a\.parquet: row 1: the assistant says"),
        (3, BadDocument, rf"^data\.path: {tmp_path}/b\.jsonl\.gz:3: not a JSON object"),
        (4, BadDocument, r"^data\.path: \S*b\.jsonl\.gz:5: the assistant says nothing"),
        (5, ConfigError, r"^data\.chat_template: \S*b\.jsonl\.gz:7: .* message 2, a turn of"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            documents[index]
        assert type(caught.value) is kind
    assert isinstance(documents[0], MarkedText)


def test_parquet_that_holds_no_conversations_is_named(tmp_path):
    for columns, message in (
        (pa.table({"messages": [b"a"]}), ": conversations cannot be JSON: .* bytes"),
        (pa.table({"text": ["a"]}), ' has the columns text; it needs "messages"'),
    ):
        pq.write_table(columns, tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=rf"^data\.path: \S*a\.parquet{message}"):
            open_documents(_config(tmp_path), "train")


def test_python_help_answers_with_docstring_and_arguments():
    config = DataConfig(source="python_help", chat_template="chatml", eval_fraction=0)
    documents = open_documents(config, "train")
    assert len(documents) > 300
    texts = [documents[i] for i in range(len(documents))]
    about = next(text for text in texts if "textwrap.dedent do?" in text.text)
    answers = [about.text[start:end] for start, end in about.spans]
    first = (textwrap.dedent.__doc__ or "").partition("\n\n")[0].strip()
    assert answers == [f"{first}<|im_end|>\n", "text<|im_end|>\n"]
