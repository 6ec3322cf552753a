# shellcheck shell=bash
# What the launch scripts share; sourced by them.

dry_run=false
pids=()          # of the processes of the current attempt
stopping=false   # a signal has come: no attempt follows

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# The arguments as one line that a shell reads back as the same words.
quoted() {
  local line
  printf -v line '%q ' "$@"
  printf '%s' "${line% }"
}

# Shows a command and runs it, unless this is a dry run.
run() {
  printf '+ %s\n' "$(quoted "$@")" >&2
  if ! "$dry_run"; then
    "$@"
  fi
}

# Whether the same command goes on where a run left off that ended with exit code $1:
# 75 preempted and saved, 124 hung, 134 lost another process.
is_restartable() {
  case "$1" in
    75 | 124 | 134) return 0 ;;
    *) return 1 ;;
  esac
}

# The exit code of a run whose processes ended with these: one that must not be retried comes before one that may be,
# and that one before what merely follows from it, such as 137 of a killed process. Prints it.
verdict() {
  local code
  for code in "$@"; do
    case "$code" in
      0 | 75 | 124 | 134 | 137 | 143) ;;
      *) echo "$code" && return ;;
    esac
  done
  for code in "$@"; do
    if is_restartable "$code"; then echo "$code" && return; fi
  done
  for code in "$@"; do
    if [[ "$code" != 0 ]]; then echo "$code" && return; fi
  done
  echo 0
}

# Hands a signal on to the processes of the current attempt, once: a second Ctrl-C stops them at once.
pass_on() {
  stopping=true
  if ((${#pids[@]})); then
    kill -s "$1" "${pids[@]}" 2>/dev/null || true
  fi
}

# From now on signals are handed on. Job control gives every process started with & a group of its own, so that a
# terminal's Ctrl-C does not reach it a second time.
take_signals() {
  set -m
  trap 'pass_on TERM' TERM
  trap 'pass_on INT' INT
}

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

# Runs a command or function again as long as its exit code asks for it: after RESTART_SECONDS (10), then twice as long
# each time up to ten minutes, MAX_RESTARTS (20) times at most. An attempt that lasted for half an hour resets
# the count.
with_restarts() {
  local restarts=0 code began pause
  export MAXPIPE_JOB="${MAXPIPE_JOB:-$(uname -n) $$ $(date +%s)}"
  while true; do
    began=$SECONDS code=0
    # A later attempt of the same job may use the run directory at once, from whichever host.
    MAXPIPE_ATTEMPT="$(date +%s)"
    export MAXPIPE_ATTEMPT
    "$@" || code=$?
    pids=()
    if "$stopping" || ! is_restartable "$code"; then
      return "$code"
    fi
    if ((SECONDS - began >= 1800)); then
      restarts=0
    fi
    if ((restarts >= ${MAX_RESTARTS:-20})); then
      printf 'exit code %s after %s restarts: giving up\n' "$code" "$restarts" >&2
      return "$code"
    fi
    pause=$((${RESTART_SECONDS:-10} * (1 << (restarts < 10 ? restarts : 10))))
    pause=$((pause < 600 ? pause : 600))
    restarts=$((restarts + 1))
    printf 'exit code %s: restart %s in %s s\n' "$code" "$restarts" "$pause" >&2
    sleep "$pause" &
    pids=($!)
    wait_for $! || true
    if "$stopping"; then
      return "$code"
    fi
  done
}
