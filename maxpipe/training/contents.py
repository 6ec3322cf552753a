"""Name what the result of a run depends on besides its configuration, for processes to compare."""

import hashlib
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import maxpipe
from maxpipe.config.errors import ConfigError
from maxpipe.config.model_places import RUN, maxtext_directory, open_folder
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.rules.layout import is_csv
from maxpipe.config.sections import Config
from maxpipe.data.fingerprint import fingerprint_data
from maxpipe.devices.agreement import source_digest
from maxpipe.storage.local_files import sampled_digest
from maxpipe.storage.model_folders import directory_digest

DEPENDENCIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_RUNTIME = "libtpu"  # installed where it is needed


def run_contents(config: Config) -> dict[str, str]:
    """Return digests and versions of what the result of a run depends on, by name.

    The content at a key's path is named by the key. What cannot be read has its error in
    place of a digest: if no process can read it, opening it reports that later.
    """
    try:
        contents = fingerprint_data(config).digests()
    except ConfigError as error:
        contents = {problem.key: problem.message for problem in error.problems}
    for key, digest in _PATHS.items():
        if value := str(get(config, key)):
            try:
                contents[key] = digest(key, value)
            except (ConfigError, OSError) as error:
                contents[key] = str(error)
    contents |= {f"code of {name}": _code_digest(name) for name in own_packages(config)}
    versions = package_versions() | {_RUNTIME: installed_version(_RUNTIME)}
    contents |= {f"version of {name}": version for name, version in versions.items()}
    return contents | {"code of maxpipe": source_digest()}


def package_versions() -> dict[str, str]:
    """Return the versions of maxpipe and of the packages that decide what a step computes."""
    # maxpipe's own version comes from the package: run from a checkout, it need not be installed.
    installed = {name: metadata.version(name) for name in DEPENDENCIES}
    return {"maxpipe": maxpipe.__version__} | installed


def own_packages(config: Config) -> list[str]:
    """Return the top-level packages of the variants in use that are not maxpipe's own."""
    names = set()
    for key, option in OPTIONS.items():
        variant = (option.bounds.variants or {}).get(str(get(config, key)))
        implementation = getattr(variant, "implementation", "")
        names.add(implementation.partition(":")[0].partition(".")[0])
    return sorted(names - {"", "maxpipe"})


def installed_version(package: str) -> str:
    """Return the version of a package, or "missing"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _model_digest(key: str, value: str) -> str:
    if value.startswith(RUN):
        return RUN  # its newest step may change meanwhile; `RunWeights` compares the one it reads
    if directory := maxtext_directory(value):
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        return directory_digest(Path(directory), files)
    return open_folder(value, key).digest()


def _file_digest(key: str, value: str) -> str:
    return sampled_digest(value, Path(value).stat().st_size)


# Keys whose values are paths, and what to compare in their place.
_PATHS: Mapping[str, Callable[[str, str], str]] = {
    "model.from_hf": _model_digest,
    "init_from": _model_digest,
    "pipeline.schedule": lambda key, name: _file_digest(key, name) if is_csv(name) else name,
    "compile.load": _file_digest,
}


def _code_digest(package: str) -> str:
    """Return a digest of the Python files of a package, or of a module's only file."""
    spec = find_spec(package)
    if spec is None or not spec.origin:
        return "not found"
    file = Path(spec.origin)
    files = sorted(file.parent.rglob("*.py")) if spec.submodule_search_locations else [file]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(file.parent)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
