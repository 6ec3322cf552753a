#!/usr/bin/env bash
# Runs a command, and runs it again when its exit code says that it would go on: 75, 124 or 134.
#
#   scripts/launch/restart.sh python -m maxpipe.train configs/base.yml
#   scripts/launch/restart.sh --dry-run ...            shows the command only
#
# MAX_RESTARTS (20) and RESTART_SECONDS (10, doubled each time up to ten minutes) come from the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_lib.sh"

if [[ "${1:-}" == --dry-run ]]; then
  dry_run=true
  shift
fi
[[ $# -gt 0 ]] || fail "usage: restart.sh [--dry-run] COMMAND [ARGUMENT ...]"

attempt() {
  printf '+ %s\n' "$(quoted "$@")" >&2
  if ! "$dry_run"; then
    "$@" &
    pids=($!)
    wait_for $!
  fi
}

take_signals
with_restarts attempt "$@"
