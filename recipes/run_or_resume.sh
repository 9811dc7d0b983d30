#!/usr/bin/env bash
# run_or_resume.sh CONFIG OUT [KEY=VALUE]...   begin the run OUT, or go on with it where it has been begun.
set -euo pipefail
config=${1:?give a configuration} out=${2:?give the folder of the run}
shift 2

if [ ! -e "$out/config.yaml" ] && [ ! -e "$out/campaign.yaml" ]; then
  exec fedfleet run "$config" "$@" --out "$out"
fi

may_change=() # what decides where and how long, and nothing of what comes out; the rest is as the run began
for override in "$@"; do
  case $override in
    executor.kind=* | executor.actors=* | executor.cpus_per_actor=* | executor.gpus_per_actor=* | executor.address=* | \
      executor.allow_differences=* | executor.node_silence_s=* | executor.memory_per_actor_gb=* | cohort.attempts=* | max_seconds=* | checkpoint.* | checkpoint=* | rounds=* | until=* | stop_if_diverged=* | \
      patience=* | patience.* | track=* | callbacks=* | code_dir=* | label=* | population.data_dir=*) may_change+=("$override") ;;
  esac
done
exec fedfleet resume "$out" "${may_change[@]}"
