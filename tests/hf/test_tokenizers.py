"""What precedes a text, and which tokens are special, as in transformers; on drawn files."""

import json
import random

import pytest
from helpers.hf_folder import write_byte_pairs
from tokenizers import Tokenizer, processors

from maxpipe.data.chat_template import load_chat_template
from maxpipe.data.tokenizers import encode_prompt, frame_of, load_tokenizer

SPECIALS = ["<s>", "</s>", "<pad>", "[MASK]"]
IDS = {token: index for index, token in enumerate(SPECIALS)}
CLASSES = [
    *(None, "PreTrainedTokenizerFast", "TokenizersBackend", "GPT2Tokenizer", "LlamaTokenizerFast"),
    *("GPTNeoXTokenizer", "GPTNeoXTokenizerFast", "Qwen2TokenizerFast"),
]
BYTES = processors.ByteLevel(trim_offsets=False)
NAMES = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"


def _template(single):
    return processors.TemplateProcessing(single=single, special_tokens=list(IDS.items()))


PROCESSORS = [
    *(None, BYTES, _template("<s> $A"), _template("<s> $A </s>"), _template("$A </s>")),
    *(_template("[MASK] <s> $A"), processors.Sequence([BYTES, _template("<s> $A")])),
    *(processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), _template("[MASK] $A")),
]


def _named(draw, **marks):
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return {
        kind: draw.choice([token, {"content": token, "lstrip": False, **marks}])
        for kind, token in names.items()
        if draw.random() < 0.9
    }


@pytest.mark.parametrize("seed", range(20))
def test_drawn_tokenizers_frame_texts_and_name_tokens_as_transformers(seed, tmp_path, transformers):
    draw = random.Random(seed)
    path = write_byte_pairs(tmp_path, "the quick brown fox", SPECIALS, size=300)
    stored = Tokenizer.from_file(str(path))
    content = json.loads(stored.to_str())
    if processor := draw.choice(PROCESSORS):
        stored.post_processor = processor
        content["post_processor"] = json.loads(stored.to_str())["post_processor"]
    else:
        content["post_processor"] = None
    path.write_text(json.dumps(content))
    config = {"tokenizer_class": draw.choice(CLASSES), **_named(draw, __type="AddedToken")}
    config |= {key: draw.choice([True, False]) for key in ("add_bos_token", "add_eos_token")}
    for key in draw.sample(["add_bos_token", "add_eos_token"], 1):
        del config[key]
    config |= {"added_tokens_decoder": {}} if draw.random() < 0.3 else {}
    if draw.random() < 0.5:
        names = {**_named(draw), "eos_token": draw.choice(["</s>", "[MASK]"])}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    config.setdefault("eos_token", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(NAMES)

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(str(path))
    ids = theirs("fox").input_ids
    plain = ours.encode("fox").tolist()
    assert frame_of(ours).begin == ids[: ids.index(plain[0])]
    assert encode_prompt(ours, "fox") == ids[: ids.index(plain[-1]) + 1]
    assert ours.eos_id == theirs.eos_token_id
    written = load_chat_template("", str(path)).render_prompt([{"role": "user"}], None)
    if config["tokenizer_class"] in CLASSES[:3]:  # others have names of their own
        assert written == theirs.apply_chat_template([{"role": "user"}], tokenize=False)
