#!/usr/bin/env bash
# Trains with N processes on this machine, each with its share of mesh.simulated_devices, as a pod would with N hosts.
#
#   scripts/launch/local.sh 2 configs/base.yml steps=20
#   scripts/launch/local.sh --dry-run 2 configs/base.yml        shows the commands only
#
# Logs of processes 1, 2, ... go to local-<index>.log in LOG_DIR (a temporary directory by default), process 0 writes
# here. Ctrl-C and SIGTERM are handed on. Ends with the exit code that matters, and restarts all of them after 75, 124
# and 134 as scripts/launch/restart.sh does.
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

free_port() {
  "$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])'
}

attempt() {
  local port=PORT index pid code codes=() command
  if ! "$dry_run"; then port="$(free_port)"; fi
  for ((index = 0; index < count; index++)); do
    command=(env JAX_PLATFORMS=cpu "JAX_COORDINATOR_ADDRESS=localhost:$port" "JAX_NUM_PROCESSES=$count"
      "JAX_PROCESS_ID=$index" "$python" -m maxpipe.train "$@")
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
  if "$dry_run"; then return; fi
  for pid in "${pids[@]}"; do
    code=0
    wait_for "$pid" || code=$?
    codes+=("$code")
  done
  code="$(verdict "${codes[@]}")"
  if [[ "$code" != 0 ]]; then
    printf 'exit codes %s: %s; logs in %s\n' "${codes[*]}" "$code" "$logs" >&2
  fi
  return "$code"
}

logs=LOGS
if ! "$dry_run"; then logs="${LOG_DIR:-$(mktemp -d)}"; fi
take_signals
with_restarts attempt "$@"
