from itertools import combinations

from helpers.pairwise import all_cases, covering_array, legal_pairs, pairs_of, sampled_product

FACTORS = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": (0, 1)}


def any_case(case):
    return True


def one_and_x_never_meet(case):
    return not (case["a"] == 1 and case["b"] == "x")


def test_every_pair_occurs():
    met = set().union(*map(pairs_of, covering_array(FACTORS, any_case)))
    for p, q in combinations(FACTORS, 2):
        assert {(p, x, q, y) for x in FACTORS[p] for y in FACTORS[q]} <= met


def test_illegal_pairs_stay_out_and_all_others_occur():
    cases = covering_array(FACTORS, one_and_x_never_meet)
    assert all(map(one_and_x_never_meet, cases))
    met = set().union(*map(pairs_of, cases))
    assert ("a", 1, "b", "x") not in met
    assert met == legal_pairs(FACTORS, any_case) - {("a", 1, "b", "x")}


def test_cases_are_few_and_always_the_same():
    cases = covering_array(FACTORS, any_case)
    assert 9 <= len(cases) <= 12
    assert cases == covering_array(FACTORS, any_case)


def test_values_that_are_best_but_illegal_together_do_not_stop_it():
    """Near its end, taking the best value for every factor leads to illegal cases only."""
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}

    def is_legal(case):
        return tuple(case.values()) not in {(2, 1, 3), (3, 2, 2), (3, 2, 3), (3, 3, 2)}

    met = set().union(*map(pairs_of, covering_array(factors, is_legal)))
    assert met == legal_pairs(factors, is_legal)


def test_a_sampled_product_has_every_legal_combination_of_its_core():
    cases = list(sampled_product(FACTORS, ("a", "b"), one_and_x_never_meet))
    assert [list(case) for case in cases] == [list(FACTORS)] * 8
    core = all_cases({name: FACTORS[name] for name in "ab"})
    assert [(c["a"], c["b"]) for c in cases] == [
        (c["a"], c["b"]) for c in core if one_and_x_never_meet(c)
    ]
    assert {c["c"] for c in cases} == {True, False}
    assert {c["d"] for c in cases} == {0, 1}
