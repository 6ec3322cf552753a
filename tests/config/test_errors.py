import pickle

from maxpipe.config import ConfigError, Problem


def test_config_error_survives_pickling():
    error = ConfigError(Problem("seed", "must be 0", "a.yml:3"), Problem("", "no file"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ConfigError
    assert copy.problems == error.problems
    assert str(copy) == "seed (a.yml:3): must be 0\nno file"
