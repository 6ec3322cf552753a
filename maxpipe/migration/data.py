"""Translate the data source, the tokenizer, sequences and evaluations."""

import os

from maxpipe.config.catalog import TOKENIZERS
from maxpipe.config.model_places import SCHEME, is_directory
from maxpipe.migration.translator import Translator

HF_READERS = {"json": "jsonl", "parquet": "parquet", "text": "text"}
GRAIN_READERS = {"arrayrecord": "array_record", "parquet": "parquet"}


def translate_data(t: Translator) -> None:
    t.copy("max_target_length", "packing", "enable_data_shuffling", "init_weights_seed")
    if t.integer("data_shuffle_seed") != t.integer("init_weights_seed"):
        t.note("data_shuffle_seed", "left out: one seed, that of init_weights_seed, does for both")
    match t.text("dataset_type"):
        case "synthetic":
            t.set("data.source", "synthetic", "dataset_type")
        case "hf":
            _translate_hf(t)
            _translate_tokenizer(t)
        case "grain":
            _translate_grain(t)
            _translate_tokenizer(t)
        case kind:
            t.refuse("dataset_type", f"{kind} is not read; use dataset_type=grain, hf or synthetic")
    _translate_eval(t)


def _translate_hf(t: Translator) -> None:
    path, files = t.text("hf_path"), t.value("hf_train_files")
    if not path:
        readers = ", ".join(HF_READERS)
        t.refuse("hf_path", f"give a data set of the hub, or {readers} and hf_train_files=PATHS")
        return
    if path not in HF_READERS:
        configuration, split = t.text("hf_name"), t.text("train_split") or "train"
        is_whole = not configuration and split == "train"
        name = f"hf:{path}" if is_whole else f"hf:{path}:{configuration}:{split}"
        t.set("data.source", "datasets", "dataset_type")
        t.set("data.path", name, "hf_path", "hf_name", "train_split")
        return
    if not files:
        t.refuse("hf_train_files", "names no files; give paths or globs, separated by commas")
    t.set("data.source", HF_READERS[path], "hf_path")
    names = files if isinstance(files, list) else [str(files)]
    t.set("data.path", ",".join(map(str, names)), "hf_train_files")


def _translate_grain(t: Translator) -> None:
    files, kind = t.text("grain_train_files"), t.text("grain_file_type")
    if t.text("grain_train_mixture_config_path") or ";" in files:
        key = "grain_train_files" if ";" in files else "grain_train_mixture_config_path"
        t.refuse(key, "a mixture is written as data.mixture in the result: give one source here")
    elif not files:
        t.refuse("grain_train_files", "names no files; give a path or a glob")
    if kind not in GRAIN_READERS:
        t.refuse("grain_file_type", f"{kind} is not read; use {' or '.join(GRAIN_READERS)}")
        return
    t.set("data.source", GRAIN_READERS[kind], "grain_file_type")
    t.set("data.path", files, "grain_train_files")
    t.set("data.num_workers", max(0, t.integer("grain_worker_count")), "grain_worker_count")


def _translate_tokenizer(t: Translator) -> None:
    path = t.text("tokenizer_path")
    inside = os.path.join(os.path.expanduser(path), "tokenizer.json")
    if path and os.path.isfile(inside):
        path = inside
    if path in TOKENIZERS or path.endswith((".json", ".model")):
        t.set("data.tokenizer", path, "tokenizer_path")
        return
    kind = "tiktoken" if path.endswith(".tiktoken") else t.text("tokenizer_type")
    if kind == "huggingface" and path and not is_directory(path):
        t.set("data.tokenizer", f"{SCHEME}{path}", "tokenizer_path")
        return
    advice = "give a tokenizer.json or .model, or tokenizer_type=huggingface and ORG/NAME"
    t.refuse("tokenizer_path", f"{path or 'nothing'} is no local tokenizer: {advice}")


def _translate_eval(t: Translator) -> None:
    every = max(0, t.integer("eval_interval"))
    t.set("eval.every", every, "eval_interval")
    if not every:
        return
    if t.integer("eval_steps") > 0:
        t.copy("eval_steps")
    else:
        t.note("eval_steps", "an evaluation has eval.batches batches, 2 unless set")
    for key in ("hf_eval_files", "grain_eval_files"):
        if t.text(key):
            t.note(key, "left out: data.eval_fraction of the training documents are set aside")
