"""Values are converted by the type of their key, not by YAML's guess."""

from maxpipe.config.options import OPTIONS
from maxpipe.config.values import Scalar, check_bounds, check_type, convert

KEYS = {int: "steps", float: "optimizer.learning_rate", bool: "data.packing", str: "run_name"}


def error_of(function, *arguments):
    try:
        return f"no error but {function(*arguments)!r}"
    except ValueError as error:
        return str(error)


def test_convert_reads_values_by_the_type_of_their_key():
    integers = {"8": 8, "-1": -1, "1e3": 1000, "1_000": 1000, "4k": 4000, "4Ki": 4096, "010": 10}
    table = {
        int: integers | {"1.5k": 1500, "1.28e5": 128_000, "9007199254740993": 9007199254740993},
        float: {"3e-4": 3e-4, "1": 1.0, ".5": 0.5, "5.": 5.0, "500k": 5e5},
        bool: {"true": True, "False": False, "on": True, "no": False},
        str: {t: t for t in ("007", "off", "no", "1e3", "2026-11-21", "true", "a: b")},
    }
    for type_, values in table.items():
        read = {text: convert(OPTIONS[KEYS[type_]], Scalar(text)) for text in values}
        assert read == values
        assert {type(value) for value in read.values()} == {type_}


def test_convert_refuses_what_is_no_value_of_the_type():
    table = {
        int: ["2.5", "abc", "0x10", "1:30", "true", "1e", ".", "k", "1e-3", "1 000", "nan"],
        float: [".nan", "inf", "-.inf", "1e999", "fast"],
        bool: ["1", "maybe"],
    }
    parts = {int: "whole number", float: "finite number", bool: "true or false"}
    for type_, texts in table.items():
        errors = {text: error_of(convert, OPTIONS[KEYS[type_]], Scalar(text)) for text in texts}
        assert {text: e for text, e in errors.items() if parts[type_] not in e} == {}
    assert "no value" in error_of(convert, OPTIONS["steps"], Scalar(""))
    assert "whole number" in error_of(convert, OPTIONS["steps"], Scalar("1e9999"))


def test_convert_null_is_a_string_only_if_quoted():
    assert "expected a string" in error_of(convert, OPTIONS["run_name"], Scalar("null"))
    assert convert(OPTIONS["run_name"], Scalar("null", quoted=True)) == "null"


def test_convert_list():
    option = OPTIONS["pipeline.layers_per_stage"]
    assert convert(option, [Scalar("3"), Scalar("1e1")]) == [3, 10]
    assert "a list such as [10, 12]" in error_of(convert, option, Scalar("3"))
    assert "whole number" in error_of(convert, option, [[Scalar("3")]])


def test_check_bounds_names_the_legal_values():
    table = {
        ("model.dtype", "float_32"): "not one of float32, bfloat16; did you mean float32",
        ("optimizer.name", "adam"): "did you mean adamw",
        ("steps", 0): "at least 1; got 0",
        ("mesh.ici.stage", 0): "at least 1, or -1 to derive it",
        ("optimizer.eps", 0.0): "greater than 0",
        ("model.dropout", 1.0): "at most 0.99",
    }
    errors = {(key, value): error_of(check_bounds, OPTIONS[key], value) for key, value in table}
    assert {case: error for case, error in errors.items() if table[case] not in error} == {}


def test_check_type_wrong_type_is_refused():
    cases = [("steps", True), ("steps", 1.0), ("steps", "5"), ("data.packing", 1), ("run_name", 7)]
    cases += [("pipeline.layers_per_stage", [1, True]), ("pipeline.layers_per_stage", (1, 2))]
    errors = [error_of(check_type, OPTIONS[key], value) for key, value in cases]
    assert [error for error in errors if "expected" not in error] == []


def test_defaults_satisfy_their_bounds():
    for option in OPTIONS.values():
        check_type(option, option.default)
        check_bounds(option, option.default)
