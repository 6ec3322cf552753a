"""The mpmd engine in several processes, each with stages of its own."""

from helpers.mpmd_processes import assert_equal_to_sequential, run_cases

TWO_STAGES = {
    "mesh.ici.stage": 2,
    "mesh.ici.data": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.num_microbatches": 4,
}


def test_loss_and_gradients_of_two_processes_equal_sequential(tmp_path):
    cases = [TWO_STAGES]
    outcomes = run_cases(tmp_path, 2, cases)
    assert_equal_to_sequential(cases, outcomes)
    # Each process compiles its own stage.
    assert [sorted(names) for names in outcomes[0].compiled] == [["B0", "F0"], ["B1", "F1"]]
