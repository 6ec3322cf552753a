#!/usr/bin/env bash
# Trains with N processes on this machine, each with its share of mesh.simulated_devices, as a pod would with N hosts.
#
#   scripts/launch/local.sh 2 configs/base.yml steps=20
#   scripts/launch/local.sh --dry-run 2 configs/base.yml        shows the commands only
#
# Logs of processes 1, 2, ... go to local-<index>.log in LOG_DIR (a temporary directory by default), process 0 writes
# here. Each has a supervisor (maxpipe supervise), which starts all of them again when one is lost, MAX_RESTARTS (20)
# times in a row at most, and ends with the exit code that matters. Ctrl-C, SIGTERM and the end of the terminal are
# handed on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_lib.sh"

if [[ "${1:-}" == --dry-run ]]; then
  dry_run=true
  shift
fi
[[ "${1:-}" =~ ^[1-9][0-9]*$ && $# -ge 2 ]] || fail "usage: local.sh [--dry-run] N CONFIG.yml [key=value ...]"
count="$1"
shift
python="${PYTHON:-python}"

pids=()

# The exit code of process $1, also when signals come while it is waited for.
wait_for() {
  local code
  while true; do
    code=0
    wait "$1" || code=$?
    if ! kill -0 "$1" 2>/dev/null; then
      return "$code"
    fi
  done
}

logs=LOGS port=PORT
if ! "$dry_run"; then
  logs="${LOG_DIR:-$(mktemp -d)}"
  mkdir -p "$logs"
  port="$("$python" -c 'from maxpipe.devices.cluster import free_port; print(free_port())')"
fi
# Job control gives every process started with & a group of its own, so that a terminal's Ctrl-C does not reach it a
# second time.
set -m
trap 'kill -s TERM "${pids[@]}" 2>/dev/null || true' TERM
trap 'kill -s INT "${pids[@]}" 2>/dev/null || true' INT
trap 'kill -s HUP "${pids[@]}" 2>/dev/null || true' HUP
for ((index = 0; index < count; index++)); do
  command=(env JAX_PLATFORMS=cpu "JAX_COORDINATOR_ADDRESS=localhost:$port" "JAX_NUM_PROCESSES=$count"
    "JAX_PROCESS_ID=$index" "$python" -m maxpipe.supervise --max-restarts "${MAX_RESTARTS:-20}" --
    "$python" -m maxpipe.train "$@")
  printf '+ %s\n' "$(quoted "${command[@]}")" >&2
  if "$dry_run"; then
    continue
  elif ((index == 0)); then
    "${command[@]}" &
  else
    "${command[@]}" >"$logs/local-$index.log" 2>&1 &
  fi
  pids+=($!)
done
if "$dry_run"; then exit; fi
codes=()
for pid in "${pids[@]}"; do
  code=0
  wait_for "$pid" || code=$?
  codes+=("$code")
done
# All supervisors end with the same code, unless one is killed; that of process 0 decides.
code="${codes[0]}"
if [[ "$code" != 0 ]]; then
  printf 'exit codes %s: %s; logs in %s\n' "${codes[*]}" "$code" "$logs" >&2
fi
exit "$code"
