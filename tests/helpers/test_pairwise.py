from helpers.pairwise import (
    Case,
    Factors,
    Pair,
    all_cases,
    covering_array,
    legal_pairs,
    pairs_of,
    sampled_product,
)

FACTORS: Factors = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": (0, 1)}


def excludes_1_with_x(case: Case) -> bool:
    return not (case["a"] == 1 and case["b"] == "x")


def test_covering_array_covers_exactly_the_legal_pairs_with_the_same_few_cases() -> None:
    cases = covering_array(FACTORS, excludes_1_with_x)
    assert all(map(excludes_1_with_x, cases))
    assert set[Pair]().union(*map(pairs_of, cases)) == legal_pairs(FACTORS, excludes_1_with_x)
    every = {pair for case in all_cases(FACTORS) for pair in pairs_of(case)}
    assert legal_pairs(FACTORS, excludes_1_with_x) == every - {("a", 1, "b", "x")}
    assert 8 <= len(cases) <= 12
    assert cases == covering_array(FACTORS, excludes_1_with_x)


def test_sampled_product_has_every_legal_combination_of_its_core() -> None:
    cases = list(sampled_product(FACTORS, ("a", "b"), excludes_1_with_x))
    core = all_cases({name: FACTORS[name] for name in "ab"})
    expected = [tuple(c.values()) for c in core if excludes_1_with_x(c)]
    assert [(c["a"], c["b"]) for c in cases] == expected
    assert [list(case) for case in cases] == [list(FACTORS)] * len(expected)
