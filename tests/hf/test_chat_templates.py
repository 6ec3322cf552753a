"""Conversations laid out, encoded and masked as transformers does it, also from an export."""

import json
from itertools import product

import numpy as np
import pytest
from helpers.hf_folder import importing, write_byte_pairs, write_folder

from maxpipe.config import replace
from maxpipe.data.chat_template import ChatTemplate, load_chat_template
from maxpipe.data.documents import encode_marked
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.hf.exporter import copy_companions
from maxpipe.training.run_directory import RunDirectory

SPECIALS = ["<s>", "</s>", "<|start|>", "<|end|>"]
TEXT = "What is it, é 漢字 😀? It is a test of the assistant and the user, {}[]:,\n"
# One marks what the assistant writes in the middle of words, one begins with a loop control and has
# tools, one trims and numbers turns with a namespace.
TEMPLATES = [
    "{{ bos_token }}{%- for m in messages %}<|start|>{{ m['role'] }}:\n"
    "{%- if m['role'] == 'assistant' %}{%- generation %} {{ m['content'] }}<|end|>"
    "{%- endgeneration %}{%- else %} {{ m['content'] }}<|end|>{%- endif %}{%- endfor %}",
    "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n"
    "{% for m in messages %}\n"
    "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
    "    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
    "{% if m.calls is defined %}{{ m.calls | tojson }}{% endif %}{{ eos_token }}"
    "{% endgeneration %}\n"
    "    {%- else %}[{{ m.content }}]{% endif %}\n"
    "{% endfor %}",
    "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}"
    "{{ n.i }}{{ m.role }}{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}"
    "{% endgeneration %}{% else %}{{ m.content | trim }}{% endif %}{% endfor %}",
]
# No turn ends with a character of several tokens, of which transformers takes the first only.
TALK = [
    {"role": "system", "content": "  be a test "},
    {"role": "user", "content": "What is é?"},
    {"role": "assistant", "content": " It is 漢字😀.\n", "calls": [{"name": "é", "a": {"b": 1.5}}]},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "the test"},
]
TOOLS = [{"type": "function", "function": {"name": "é<>", "parameters": {}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_byte_pairs(tmp_path_factory.mktemp("tokenizer"), TEXT, SPECIALS, size=330)
    (path.parent / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": {"content": "</s>"}}'
    )
    return path.parent


def test_conversation_has_text_ids_and_targets_of_transformers(folder, transformers):
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    for source, tools in product(TEMPLATES, [None, TOOLS]):
        (folder / "chat_template.jinja").write_text(source)
        words = {"tools": tools, "chat_template": source}
        masked = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = theirs.apply_chat_template(TALK, **words, **masked)
        rendered = load_chat_template("", str(folder)).render(TALK, tools)
        assert rendered.text == theirs.apply_chat_template(TALK, **words, tokenize=False)
        ids, weights = encode_marked(rendered, load_tokenizer(str(folder)))
        np.testing.assert_array_equal(ids, expected["input_ids"])
        np.testing.assert_array_equal(weights, expected["assistant_masks"])
        assert 0 < weights.sum() < len(weights)


def test_reasoning_has_the_names_that_transformers_gives_it(folder, transformers):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<think>"
        "{{ m.READ }}</think>{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    names = ("reasoning_content", "thinking", "reasoning")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    givens = [*((name,) for name in names), names[1:], names[::-1], ()]
    for read, given in product(names, givens):
        source = template.replace("READ", read)
        turn = {"role": "assistant", "content": "a", **{name: f"{name}!" for name in given}}
        expected = theirs.apply_chat_template([turn], chat_template=source, tokenize=False)
        assert ChatTemplate(source, (), "t").render([turn], None).text == expected


def export_of(config, name, target, **values):
    run = replace(config, run_name=name, **values)
    directory = RunDirectory(run)
    directory.claim()
    target.mkdir()
    copy_companions(target, sorted(directory.tokenizer.iterdir()), directory.origin)
    return {file.name: file.read_text() for file in target.iterdir()}


def test_trained_template_takes_the_place_of_the_imported_one(tmp_path):
    source = write_folder(tmp_path / "model")
    (source / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    listed = {"eos_token": "</s>", "chat_template": [{"name": "default", "template": "listed"}]}
    (source / "tokenizer_config.json").write_text(json.dumps(listed))
    own = {"data.source": "chat", "data.tokenizer": f"hf:{source}", "output_dir": str(tmp_path)}
    config = replace(importing(source), **own)
    chatml = {"data.chat_template": "chatml"}
    files = export_of(config, "other", tmp_path / "hf-other", **chatml)
    assert "<|im_start|>" in files["chat_template.jinja"]
    assert json.loads(files["tokenizer_config.json"]) == {"eos_token": "</s>"}
    assert "chat_template.json" not in files
    (source / "chat_template.jinja").unlink()
    files = export_of(config, "same", tmp_path / "hf-same")
    assert "chat_template.jinja" not in files
    assert json.loads(files["tokenizer_config.json"]) == listed
    assert "chat_template.json" in files
