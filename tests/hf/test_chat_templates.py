"""Conversations laid out, encoded and masked as transformers does it."""

import numpy as np
import pytest
from helpers.hf_folder import write_byte_pairs

from maxpipe.data.chat_template import load_chat_template
from maxpipe.data.documents import encode_marked
from maxpipe.data.tokenizers import load_tokenizer

transformers = pytest.importorskip("transformers", reason="needs the extra `hf-test`")

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
    """Return the path of a tokenizer.json of byte pairs."""
    path = write_byte_pairs(tmp_path_factory.mktemp("tokenizer"), TEXT, SPECIALS, size=330)
    (path.parent / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": {"content": "</s>"}}'
    )
    return path.parent


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("source", TEMPLATES, ids=range(len(TEMPLATES)))
def test_conversation_has_text_ids_and_targets_of_transformers(source, tools, folder):
    (folder / "chat_template.jinja").write_text(source)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    expected = theirs.apply_chat_template(
        TALK,
        tools=tools,
        chat_template=source,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    text = theirs.apply_chat_template(TALK, tools=tools, chat_template=source, tokenize=False)

    rendered = load_chat_template("", str(folder)).render(TALK, tools)
    ids, weights = encode_marked(rendered, load_tokenizer(str(folder)))
    assert rendered.text == text
    np.testing.assert_array_equal(ids, expected["input_ids"])
    np.testing.assert_array_equal(weights, expected["assistant_masks"])
    assert 0 < weights.sum() < len(weights)
