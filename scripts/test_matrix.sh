#!/usr/bin/env bash
# Runs the tests in a fresh virtual environment with every Python from 3.11 on that this machine has, each with the
# newest jax that Python can install. With --tpu it runs the tests of what TPU compilers must say, flags included,
# with three releases of jax, the oldest that is supported among them, each with its libtpu, and the newest Python.
#
#   scripts/test_matrix.sh                   the default tests
#   scripts/test_matrix.sh -m grid           arguments go to pytest
#   scripts/test_matrix.sh --tpu
#
# Looks for python3.N on the PATH and among pyenv's versions. Exits with 1 if any Python fails or none is found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

workspace="$(mktemp -d)"
trap 'rm -rf "$workspace"' EXIT
TPU_JAX=(0.10.2 0.11.1 0.12.0.1)
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

# Prints "3.N" if $1 is a usable interpreter from 3.11 on.
minor_version() {
  "$1" -c 'import sys, venv, ensurepip
if sys.version_info < (3, 11): sys.exit(1)
print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

declare -A interpreters=()
shopt -s nullglob
for minor in {11..20}; do
  for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
    if version="$(minor_version "$candidate")" && [[ -z "${interpreters[$version]:-}" ]]; then
      interpreters[$version]="$candidate"
    fi
  done
done
if [[ ${#interpreters[@]} -eq 0 ]]; then
  echo "no Python from 3.11 on with the venv module" >&2
  exit 1
fi

test_with() {
  local version="$1" venv="$workspace/$1"
  shift
  "${interpreters[$version]}" -m venv "$venv" &&
    "$venv/bin/pip" install --quiet -e ".[test]" &&
    "$venv/bin/python" -m pytest -q "$@"
}

test_with_tpu() {
  local venv="$workspace/tpu" newest="$1" jax="$2"
  "${interpreters[$newest]}" -m venv --clear "$venv" &&
    "$venv/bin/pip" install --quiet -e ".[test,tpu]" "jax[tpu]==$jax" &&
    "$venv/bin/python" -m pytest -q -m tpu_aot tests/devices tests/compile &&
    # Every engine's step has the estimates that predictions read.
    "$venv/bin/python" -m pytest -q -m 'tpu_aot and not grid' tests/test_compile.py -k every_engine
}

report=()
status=0
if [[ "${1:-}" == --tpu ]]; then
  newest="$(printf '%s\n' "${!interpreters[@]}" | sort -V | tail -1)"
  for jax in "${TPU_JAX[@]}"; do
    printf '\n== Python %s, jax %s\n' "$newest" "$jax"
    result=passed
    test_with_tpu "$newest" "$jax" </dev/null || { result=FAILED; status=1; }
    libtpu="$("$workspace/tpu/bin/python" -c 'import importlib.metadata as m; print(m.version("libtpu"))' || true)"
    report+=("Python $newest  jax $jax  libtpu $libtpu  $result")
  done
  printf '\n%s' "${report[@]}"
  printf '\n'
  exit "$status"
fi
for version in $(printf '%s\n' "${!interpreters[@]}" | sort -V); do
  printf '\n== Python %s (%s)\n' "$version" "${interpreters[$version]}"
  if test_with "$version" "$@" </dev/null; then
    result=passed
  else
    result=FAILED
    status=1
  fi
  jax="$("$workspace/$version/bin/python" -c 'import importlib.metadata as m; print(m.version("jax"))' 2>/dev/null || echo "not installed")"
  report+=("Python $version  jax $jax  $result")
  rm -rf "${workspace:?}/$version"
done

printf '\n'
printf '%s\n' "${report[@]}"
exit "$status"
