"""Conversations laid out by templates, and what of them the assistant writes."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.data.chat_template import ChatTemplate, load_chat_template
from maxpipe.data.documents import BadDocument

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]
# Two dialects without marks: one closes every turn, one puts the assistant's text behind a space.
CLOSED = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPACED = (
    "{%- for m in messages %}\n"
    "    {%- if m['role'] == 'system' %}{% continue %}{% endif %}\n"
    "    {{- '[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' "
    "else ' ' + m['content'] + eos_token }}\n"
    "{%- endfor %}"
)
LAST_DIFFERS = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think>"
    "{% endif %}{{ m.content }}{% endfor %}"
)


def _template(source):
    return ChatTemplate(source, (("bos_token", "<s>"), ("eos_token", "</s>")), "the template")


def _targets(text):
    return [text.text[start:end] for start, end in text.spans]


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{%- generation -%}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
)


def test_assistants_turns_are_what_is_between_marks_or_what_a_turn_adds():
    closed = (
        "<s><system>Be brief.</s>\n<user>One?</s>\n<assistant>1</s>\n"
        "<user>Two?</s>\n<assistant>2</s>\n"
    )
    spaced = "[INST] One? [/INST] 1</s>[INST] Two? [/INST] 2</s>"
    asking = "{% if messages[0].role != 'system' %}Be kind.</s>{% endif %}" + CLOSED
    asked = "Be kind.</s><s><assistant>1</s>\n<user>Two?</s>\n<assistant>2</s>\n"
    marked = closed.removeprefix("<s>").replace("\n", "")
    nested = "a{% generation %}b{% generation %}c{% endgeneration %}d{% endgeneration %}e"
    turns = ["1</s>\n", "2</s>\n"]
    for source, talk, text, targets in [
        (CLOSED, TALK, closed, turns),
        (SPACED, TALK, spaced, [" 1</s>", " 2</s>"]),
        (asking, TALK[2:], asked, turns),  # asks for a message of the system
        ("{# no {% generation %} #}" + CLOSED, TALK, closed, turns),
        ("{#-\n{% generation %}\n-#}" + CLOSED, TALK, closed, turns),
        (MARKED, TALK, marked, ["1", "2"]),
        (MARKED.replace("{%- generation -%}", "{%+ generation %}"), TALK, marked, ["1", "2"]),
        (nested, TALK, "abcde", ["bcd"]),
    ]:
        template = pickle.loads(pickle.dumps(_template(source)))
        with ThreadPoolExecutor(4) as pool:  # a loader reads in threads
            for rendered in pool.map(template.render, [talk] * 8, [None] * 8):
                assert (rendered.text, _targets(rendered)) == (text, targets)


def test_conversation_that_a_template_refuses_is_a_bad_document():
    adding = (
        "{% for m in messages %}{% if m.content == 'stop' %}{{ raise_exception('no stops') }}"
        "{% endif %}{{ m.role + m.content }}{% endfor %}"
    )
    for source, messages, reason in [
        (adding, TALK[:2], "the assistant says nothing in it, laid out by the template"),
        (adding, [{"role": "assistant", "content": 3}], "lay it out: TypeError"),
        (adding, [{"role": "assistant", "content": "stop"}], "lay it out: TemplateError: no stops"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", TALK, "SecurityError"),
    ]:
        with pytest.raises(BadDocument, match=reason):
            _template(source).render(messages, None)


def test_turns_that_change_when_others_follow_ask_for_marks():
    assert _targets(_template(LAST_DIFFERS).render(TALK[:3], None)) == ["<assistant><think>1"]
    reason = r"^data\.chat_template: the template lays out message 3, .*\{% generation %\}"
    with pytest.raises(ConfigError, match=reason) as error:
        _template(LAST_DIFFERS).render(TALK, None)
    assert not isinstance(error.value, BadDocument)  # skipping it would skip most of the data


def test_turn_of_weight_0_is_not_learned():
    for source, learned in [(CLOSED, "2</s>\n"), (MARKED, "2")]:
        talk = [*TALK[:2], {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
        assert _targets(_template(source).render(talk, None)) == [learned]
        talk[4]["weight"] = 0
        with pytest.raises(BadDocument, match="every turn has weight 0"):
            _template(source).render(talk, None)
        del talk[4]["weight"]
        with pytest.raises(BadDocument, match="marks 3 stretches for 2 turns"):
            _template("{% generation %}{% endgeneration %}" + MARKED).render(talk, None)


def test_date_of_a_template_is_that_of_its_run():
    source = "{{ strftime_now('%d %b %Y') }}" + CLOSED
    template = ChatTemplate(source, (), "t", date="2024-07-26")
    assert template.render(TALK, None).text.startswith("26 Jul 2024<")
    for date, reason in [("July", "'July' is no date"), ("2024-07-26", "chatml writes no date")]:
        with pytest.raises(ConfigError, match=rf"^data\.chat_date: .*{reason}"):
            load_chat_template("chatml", "byte", date=date)


def _folder(directory, **config):
    (directory / "tokenizer.json").touch()
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def test_tokenizers_own_template_comes_from_its_files(tmp_path):
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "of a list"}]
    folder = _folder(tmp_path, chat_template=named, eos_token={"content": "</s>"}, bos_token=None)
    template = load_chat_template("", folder)
    assert (template.source, template.special_tokens) == ("of a list", (("eos_token", "</s>"),))
    _folder(tmp_path, chat_template="of the configuration")
    assert load_chat_template("", f"{folder}/tokenizer.json").source == "of the configuration"
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert load_chat_template("", f"hf:{folder}").source == "of a file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert load_chat_template(str(tmp_path / "mine.jinja"), folder).source == "mine"


def test_template_for_tools_is_that_of_conversations_with_tools(tmp_path):
    marked = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    sources = {
        "default": f"\n plain {marked} {{{{ documents is none }}}}\n  ",
        "tool_use": f"\n{{{{ tools[0] }}}} {marked}\n\n",
    }
    named = [{"name": name, "template": source} for name, source in sources.items()]
    template = load_chat_template("", _folder(tmp_path, chat_template=["a", *named]))
    talk = [{"role": "assistant", "content": "a"}]
    for tools, name in ((None, "default"), (["f"], "tool_use"), ([{}], "tool_use")):
        assert template.render(talk, tools) == _template(sources[name]).render(talk, tools)
    assert template.render(talk, None).text == "\n plain a True\n  "


def test_missing_or_unusable_template_is_named(tmp_path):
    for template in [None, ["a"], [{"name": "rag", "template": "no"}]]:
        folder = _folder(tmp_path, eos_token="</s>", chat_template=template)
        with pytest.raises(ConfigError, match=r"no chat template of its own: data\.chat_template="):
            load_chat_template("", folder)
    file = tmp_path / "mine.jinja"
    with pytest.raises(ConfigError, match=r"^data\.chat_template: \S*mine\.jinja cannot be read"):
        load_chat_template(str(file), "byte")
    for content, reason in {
        "{% for m in messages %}": "line 1: Unexpected end of template",
        "{% break %}": "line 11: 'break' outside loop",
    }.items():
        file.write_text(content)
        problem = rf"^data\.chat_template: \S*mine\.jinja is no chat template: {reason}"
        with pytest.raises(ConfigError, match=problem):
            load_chat_template(str(file), "byte")
