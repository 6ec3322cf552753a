#!/usr/bin/env bash
# Trains on Cloud TPU VMs, one slice or several, through gcloud.
#
#   scripts/launch/tpu_vm.sh create NAME --zone us-east5-a --type v5p-32 [--slices 2] [--spot] [--version RUNTIME]
#   scripts/launch/tpu_vm.sh setup  NAME --zone us-east5-a
#   scripts/launch/tpu_vm.sh run    NAME --zone us-east5-a -- configs/models/llama3-8b.yml output_dir=/mnt/shared/runs
#   scripts/launch/tpu_vm.sh status NAME --zone us-east5-a
#   scripts/launch/tpu_vm.sh logs   NAME --zone us-east5-a
#   scripts/launch/tpu_vm.sh resume NAME --zone us-east5-a --type v5p-32 -- configs/models/llama3-8b.yml output_dir=...
#   scripts/launch/tpu_vm.sh delete NAME --zone us-east5-a
#
#   create   asks for a queued resource and waits for it; does nothing if it is there
#   setup    copies the committed files of this repository to every worker and installs them
#   run      starts the training on every worker, detached; does nothing on workers where it runs
#   status   state of the resource, and on every worker whether the training runs or how it ended
#   logs     follows the log of the first worker
#   resume   replaces what was preempted, then continues: create, setup, run
#   delete   stops everything and gives the TPUs back
#
# --project P picks the project, --dry-run shows what would be run. Every command may be repeated. Each worker has a
# supervisor (maxpipe supervise); they start the training again on all workers when one is lost. output_dir has to be
# a directory that all workers share, such as a Filestore mount. Tokens come from the workers' environment, never from
# here. LIBTPU_INIT_ARGS is handed on to the training; python -m maxpipe.compile prints the recommended one for a chip.
# So is MAXPIPE_JOB, "NAME in ZONE" by default: with another one the training goes back to checkpoint.resume=STEP again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_lib.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

usage="usage: tpu_vm.sh create|setup|run|status|logs|resume|delete NAME --zone ZONE [...]; see the top of the file"
zone='' type='' version='' project=() slices=1 spot=() training=() positional=()
while (($#)); do
  case "$1" in
    --dry-run) dry_run=true ;;
    --spot) spot=(--spot) ;;
    --zone | --type | --version | --slices | --project)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      case "$1" in
        --zone) zone="$2" ;;
        --type) type="$2" ;;
        --version) version="$2" ;;
        --slices) slices="$2" ;;
        --project) project=(--project "$2") ;;
      esac
      shift
      ;;
    --)
      shift
      training=("$@")
      break
      ;;
    -h | --help)
      sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit
      ;;
    -*) fail "there is no option $1; $usage" ;;
    *) positional+=("$1") ;;
  esac
  shift
done
((${#positional[@]} == 2)) || fail "$usage"
action="${positional[0]}" name="${positional[1]}"
[[ "$name" =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || fail "NAME: lower-case letters, digits and '-', beginning with a letter"
[[ -n "$zone" ]] || fail "--zone is missing"
[[ "$slices" =~ ^[1-9][0-9]*$ ]] || fail "--slices is not a number: $slices"

tpus() {
  run gcloud compute tpus "$@" --zone "$zone" ${project[@]+"${project[@]}"} --quiet
}

# A field of the queued resource; empty if there is none.
field() {
  tpus queued-resources describe "$name" --format "value($1)" 2>/dev/null || true
}

# Such as ACTIVE, WAITING_FOR_RESOURCES or SUSPENDED.
state() {
  field state.state
}

# Names of the slices, one per line.
nodes() {
  local count
  count="$(field 'tpu.nodeSpec[0].multisliceParams.nodeCount')"
  if "$dry_run"; then count="$slices"; fi
  if [[ "${count:-1}" -le 1 ]]; then
    echo "$name"
  else
    seq -f "$name-%.0f" 0 $((count - 1))
  fi
}

# Runs a shell command on every worker of every slice at the same time.
everywhere() {
  local node pid code=0
  local jobs=()
  for node in $(nodes); do
    tpus tpu-vm ssh "$node" --worker=all --command "$1" &
    jobs+=($!)
  done
  for pid in "${jobs[@]}"; do
    wait "$pid" || code=$?
  done
  return "$code"
}

runtime_version() {
  case "$type" in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) fail "--version is missing: no default for --type $type" ;;
  esac
}

create() {
  local now nodes_of=(--node-id "$name")
  [[ -n "$type" ]] || fail "--type is missing, such as v5p-32"
  version="${version:-$(runtime_version)}"
  ((slices == 1)) || nodes_of=(--node-prefix "$name" --node-count "$slices")
  if [[ -n "$(state)" ]]; then
    echo "$name is there"
  else
    tpus queued-resources create "$name" "${nodes_of[@]}" --accelerator-type "$type" \
      --runtime-version "$version" ${spot[@]+"${spot[@]}"}
  fi
  until "$dry_run" || [[ "$(state)" == ACTIVE ]]; do
    now="$(state)"
    case "$now" in
      FAILED | SUSPENDED | '') fail "$name is ${now:-gone}; scripts/launch/tpu_vm.sh resume replaces it" ;;
    esac
    echo "$name is $now"
    sleep "${POLL_SECONDS:-30}"
  done
}

setup() {
  local archive node
  archive="${TMPDIR:-/tmp}/maxpipe-$name.tar.gz"
  run git -C "$root" archive --format=tar.gz --output="$archive" HEAD
  for node in $(nodes); do
    tpus tpu-vm scp "$archive" "$node:maxpipe.tar.gz" --worker=all
  done
  # shellcheck disable=SC2016 # the workers expand it
  everywhere 'set -e
mkdir -p maxpipe && tar -xzf maxpipe.tar.gz -C maxpipe && cd maxpipe
python=$(command -v python3.13 || command -v python3.12 || command -v python3.11 || true)
if [ -z "$python" ]; then
  sudo apt-get update -q && sudo apt-get install -qy python3.11 python3.11-venv
  python=python3.11
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/pip install -q -e ".[tpu]"'
}

start() {
  local flags=''
  ((${#training[@]})) || fail "what to train is missing: -- CONFIG.yml [key=value ...]"
  [[ -z "${LIBTPU_INIT_ARGS:-}" ]] || flags="LIBTPU_INIT_ARGS=$(quoted "$LIBTPU_INIT_ARGS") "
  everywhere "cd maxpipe
if [ -f pid ] && kill -0 \$(cat pid) 2>/dev/null; then echo already running; exit; fi
rm -f exit_code
${flags}MAXPIPE_JOB=$(quoted "${MAXPIPE_JOB:-$name in $zone}") MAXPIPE_DISTRIBUTED=1 nohup sh -c '\"\$@\"; echo \$? >exit_code' sh .venv/bin/python -m maxpipe.supervise -- .venv/bin/python -m maxpipe.train \
$(quoted "${training[@]}") >log 2>&1 </dev/null & echo \$! >pid"
}

status() {
  echo "$name: $(state)"
  # shellcheck disable=SC2016 # the workers expand it
  everywhere 'if [ ! -f maxpipe/pid ]; then echo not started; exit; fi
cd maxpipe
if kill -0 $(cat pid) 2>/dev/null; then echo running
elif [ -f exit_code ]; then echo ended with exit code $(cat exit_code)
else echo ended without an exit code; fi'
}

logs() {
  tpus tpu-vm ssh "$(nodes | head -n 1)" --worker=0 --command 'tail -n 100 -F maxpipe/log'
}

delete() {
  if [[ -z "$(state)" ]] && ! "$dry_run"; then
    echo "$name is gone"
    return
  fi
  tpus queued-resources delete "$name" --force
}

resume() {
  case "$(state)" in
    FAILED | SUSPENDED | SUSPENDING) delete ;;
  esac
  create
  setup
  start
}

case "$action" in
  create | setup | status | logs | resume | delete) "$action" ;;
  run) start ;;
  *) fail "there is no command $action; $usage" ;;
esac
