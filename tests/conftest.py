"""Runs JAX on eight simulated CPU devices, and an S3 server for the tests that ask for it."""

import gc
import hashlib
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.quick_compile import QUICK_COMPILE
from hypothesis import settings

TESTS = Path(__file__).parent

# XLA ends a process whose devices wait for each other for 40 seconds, except in an all-reduce; on a
# busy machine they may.
PATIENCE = ["--xla_cpu_collective_call_terminate_timeout_seconds=300"]

# Before JAX is imported, and by environment variables, so that processes started by tests do the
# same.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILE + PATIENCE))
os.environ.setdefault("NPROC", "64")  # see `maxpipe.simulated_devices`
# No test may find what an earlier one has compiled.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# In the background of a shell Ctrl-C is ignored, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longest, in this order: a worker that begins one last keeps the others waiting.
LONGEST = (
    "golden/test_golden.py",
    "multiprocess/test_training.py",
    "reliability/test_resume.py",
    "test_documented_runs.py",
    "test_train.py",
    "test_docs.py",
    "test_compile.py",
    "test_clusters.py",
    "multiprocess/test_supervised_training.py",
    "pipeline/engines/test_equals_one_device.py",
    "training/test_phases.py",
    "training/test_trainer_contract.py",
    "training/test_samples.py",
)


# Of the 65530 parts of memory that Linux maps for a process by default. Every compiled function
# takes several, and XLA ends a process that cannot get more.
MOST_MAPS = 20_000

# A busy machine is no failure.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_addoption(parser):
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run one in N of the selected tests that are marked slow or grid",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, obj):
    """Make no tests of the many cases of a grid, or of slow pairs, where none is selected."""
    marks = getattr(obj, "pytestmark", None)
    names = {mark.name for mark in marks} if isinstance(marks, list) else set()
    expression = collector.config.option.markexpr
    is_left_out = ("grid" in names and expression.startswith("not grid")) or (
        "slow" in names and expression == "not grid and not slow"
    )
    return [] if is_left_out else None


@pytest.hookimpl(trylast=True)  # after marks have selected
def pytest_collection_modifyitems(config, items):
    """Take one in N further cases; begin with the longest files, and keep the order otherwise."""
    further = [item for item in items if {"slow", "grid"} & {m.name for m in item.iter_markers()}]
    left_out = [item for i, item in enumerate(further) if i % config.option.one_in]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        without = set(left_out)
        items[:] = [item for item in items if item not in without]
    first = {TESTS / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in first)
    items.sort(key=lambda item: first.get(item.path, len(first)))


def pytest_collection_finish():
    """Look for garbage less often, and not in what was loaded: about a tenth of tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session")
def programs_of_process():
    """Programs that this process has compiled, by their text: JAX keeps them by function."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def few_maps(programs_of_process):
    """Drop what this process has compiled if it holds a lot."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        programs_of_process.clear()
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="module", autouse=True)
def compiled_once(request, programs_of_process, few_maps):
    """Let tests share what they compile, as JAX does not across its functions."""
    from jax._src import compiler  # there is no public name for it

    compile_anew, programs = compiler.backend_compile_and_load, programs_of_process
    # At level 0 jax 0.12 rounds the same numbers differently in arrays of different shapes.
    same_rounding = request.node.get_closest_marker("same_rounding") is not None
    if same_rounding:
        sys.modules["jax"].clear_caches()  # earlier tests have compiled the same functions

    def compile_or_take(backend, module, devices, options, host_callbacks):
        if same_rounding:
            level = ("xla_backend_optimization_level", "1")
            options.env_option_overrides = [*options.env_option_overrides, level]
        if host_callbacks:
            return compile_anew(backend, module, devices, options, host_callbacks)
        text = f"{module} {devices}".encode()
        key = hashlib.sha256(text).digest(), options.SerializeAsString()
        if key not in programs:
            programs[key] = compile_anew(backend, module, devices, options, host_callbacks)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "backend_compile_and_load", compile_or_take)
        yield


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Work in a folder without runs: README's first run leaves `runs/base` in the checkout."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def s3_server():
    module = pytest.importorskip("moto.server", reason="needs the extra `test`: moto[server]")
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    running = module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def without_s3_keys(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


@pytest.fixture
def s3(s3_server, monkeypatch, without_s3_keys):
    """A client of the server, whose address and keys are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return pytest.importorskip("boto3").client("s3", region_name="us-east-1")
