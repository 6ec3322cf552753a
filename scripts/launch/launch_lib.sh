# shellcheck shell=bash
# What the launch scripts share; sourced by them.

dry_run=false

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
