"""Values are converted by the type of their key, not by YAML's guess."""

import pytest

from maxpipe.config.options import OPTIONS
from maxpipe.config.values import Scalar, check_bounds, check_type, convert


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("1e3", 1000),
        ("1_000", 1000),
        ("4k", 4000),
        ("2M", 2_000_000),
        ("4Ki", 4096),
        ("2Mi", 2_097_152),
        ("1.5k", 1500),
        ("1.28e5", 128_000),
        ("010", 10),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_convert_integer(text, value):
    assert convert(OPTIONS["steps"], Scalar(text)) == value


@pytest.mark.parametrize(
    "text", ["2.5", "abc", "0x10", "1:30", "true", "1e", ".", "k", "1e-3", "", "1 000", "nan"]
)
def test_convert_integer_malformed_is_refused(text):
    with pytest.raises(ValueError, match=r"whole number|no value"):
        convert(OPTIONS["steps"], Scalar(text))


def test_convert_integer_huge_is_refused_quickly():
    with pytest.raises(ValueError, match="too large"):
        convert(OPTIONS["steps"], Scalar("1e9999"))


@pytest.mark.parametrize(
    ("text", "value"), [("3e-4", 3e-4), ("1", 1.0), (".5", 0.5), ("5.", 5.0), ("500k", 5e5)]
)
def test_convert_float(text, value):
    assert convert(OPTIONS["optimizer.learning_rate"], Scalar(text)) == value


@pytest.mark.parametrize("text", [".nan", "inf", "-.inf", "1e999", "fast"])
def test_convert_float_malformed_is_refused(text):
    with pytest.raises(ValueError, match="finite number"):
        convert(OPTIONS["optimizer.learning_rate"], Scalar(text))


@pytest.mark.parametrize("text", ["007", "off", "no", "1e3", "2026-11-21", "true", "a: b"])
def test_convert_string_stays_as_written(text):
    assert convert(OPTIONS["run_name"], Scalar(text)) == text


def test_convert_string_with_choices_takes_yaml_booleans():
    option = OPTIONS["pipeline.skip_idle"]
    value = convert(option, Scalar("true"))
    check_bounds(option, value)
    assert value == "true"


def test_convert_null_is_a_string_only_if_quoted():
    with pytest.raises(ValueError, match="no value"):
        convert(OPTIONS["run_name"], Scalar("null"))
    assert convert(OPTIONS["run_name"], Scalar("null", quoted=True)) == "null"


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("False", False), ("on", True), ("no", False)]
)
def test_convert_bool(text, value):
    assert convert(OPTIONS["data.packing"], Scalar(text)) is value


@pytest.mark.parametrize("text", ["1", "maybe"])
def test_convert_bool_malformed_is_refused(text):
    with pytest.raises(ValueError, match="true or false"):
        convert(OPTIONS["data.packing"], Scalar(text))


def test_convert_list():
    option = OPTIONS["pipeline.layers_per_stage"]
    assert convert(option, [Scalar("3"), Scalar("1e1")]) == [3, 10]
    with pytest.raises(ValueError, match=r"a list such as \[10, 12\]"):
        convert(option, Scalar("3"))
    with pytest.raises(ValueError, match="whole number"):
        convert(option, [[Scalar("3")]])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.dtype", "float_32", "not one of float32, bfloat16; did you mean float32"),
        ("optimizer.name", "adam", "did you mean adamw"),
        ("steps", 0, "at least 1; got 0"),
        ("mesh.ici.stage", 0, "at least 1, or -1 to derive it"),
        ("optimizer.eps", 0.0, "greater than 0"),
        ("model.dropout", 1.0, "at most 0.99"),
    ],
)
def test_check_bounds_names_the_legal_values(key, value, message):
    with pytest.raises(ValueError, match=message):
        check_bounds(OPTIONS[key], value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", True),
        ("steps", 1.0),
        ("steps", "5"),
        ("data.packing", 1),
        ("model.dropout", "0"),
        ("pipeline.layers_per_stage", [1, True]),
        ("pipeline.layers_per_stage", (1, 2)),
        ("run_name", 7),
    ],
)
def test_check_type_wrong_type_is_refused(key, value):
    with pytest.raises(ValueError, match="expected"):
        check_type(OPTIONS[key], value)


def test_defaults_satisfy_their_bounds():
    for option in OPTIONS.values():
        check_type(option, option.default)
        check_bounds(option, option.default)
