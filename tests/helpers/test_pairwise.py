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


def test_covering_array_whose_greedy_cases_are_all_illegal_terminates() -> None:
    """Near the end of the search, the best value of every factor leads to illegal cases only."""
    factors: Factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}

    def is_legal(case: Case) -> bool:
        return tuple(case.values()) not in {(2, 1, 3), (3, 2, 2), (3, 2, 3), (3, 3, 2)}

    covered = set[Pair]().union(*map(pairs_of, covering_array(factors, is_legal)))
    assert covered == legal_pairs(factors, is_legal)


def test_sampled_product_has_every_legal_combination_of_its_core() -> None:
    cases = list(sampled_product(FACTORS, ("a", "b"), excludes_1_with_x))
    assert [list(case) for case in cases] == [list(FACTORS)] * 8
    core = all_cases({name: FACTORS[name] for name in "ab"})
    assert [(c["a"], c["b"]) for c in cases] == [
        (c["a"], c["b"]) for c in core if excludes_1_with_x(c)
    ]
    assert {c["c"] for c in cases} == {True, False}
    assert {c["d"] for c in cases} == {0, 1}
