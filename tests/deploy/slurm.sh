#!/usr/bin/env bash
# examples/slurm/run.sbatch for real: Debian's Slurm with this machine as its only node, as root. A job trains the
# example; another one is ended by a signal, as before its time limit, and the same command continues it.
# Ends in a line `VERDICT: ...`. Five minutes on two cores.
#
#   tests/deploy/slurm.sh
#
#   VENV   environment with asyncrl (default .venv)
# With pipefail, a reader that ends early (head, grep -q) would fail its writer by SIGPIPE: they read all.
set -Eeuo pipefail
cd "$(dirname "$0")/../.."
PATH=$(realpath "${VENV:-.venv}")/bin:$PATH
scratch=$(mktemp -d)
checks=0
daemons=()

say() { printf '%s %s\n' "$(date +%T)" "$*"; }
passed() { checks=$((checks + 1)); say "ok: $*"; }
end() {
  set +e
  [ ${#daemons[@]} = 0 ] || { scancel --full --user=root 2>/dev/null; sleep 2; kill "${daemons[@]}" 2>/dev/null; wait; }
}
fail() {
  say "FAILED: $*" >&2
  trap - ERR EXIT
  tail -n 25 "$scratch"/*.log >&2
  end
  echo "VERDICT: failed after $checks checks: $*"
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
trap '[ "$BASHPID" != $$ ] || fail "ended early"' EXIT
until_true() {  # SECONDS WHAT COMMAND...: wait until COMMAND succeeds
  local what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@"; do
    [ $SECONDS -lt $end ] || fail "$what did not happen in time"
    sleep 1
  done
}

missing=
for name in slurmctld slurmd munged jq; do command -v $name >/dev/null || missing=yes; done
if [ "$missing" ]; then
  say "installing Debian's slurm-wlm"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends slurm-wlm munge jq >/dev/null
  service slurmctld stop >/dev/null 2>&1 || true
  service slurmd stop >/dev/null 2>&1 || true
fi

node=$(hostname -s)
export SLURM_CONF=$scratch/slurm.conf
cat > "$SLURM_CONF" <<END
ClusterName=asyncrl-test
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$scratch/munge.socket
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=$node NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
END
mkdir "$scratch/state" "$scratch/spool"
chmod 755 "$scratch"
head -c 128 /dev/urandom > "$scratch/munge.key"
chmod 400 "$scratch/munge.key"
munged --foreground --force --socket="$scratch/munge.socket" --key-file="$scratch/munge.key" \
  --pid-file="$scratch/munge.pid" --seed-file="$scratch/munge.seed" --log-file="$scratch/munged.log" \
  --num-threads=2 2>"$scratch/munge.log" &
daemons+=($!)
until_true 20 "munge's socket" test -S "$scratch/munge.socket"
slurmctld -D > "$scratch/slurmctld.log" 2>&1 &
daemons+=($!)
slurmd -D > "$scratch/slurmd.log" 2>&1 &
daemons+=($!)
idle() { sinfo --noheader --format=%T 2>/dev/null | grep idle >/dev/null; }
until_true 60 "an idle node" idle
passed "Slurm $(slurmctld -V | cut -d' ' -f2) has an idle node"

# Agents reach the controller by this machine's name.
getent hosts "$node" >/dev/null || fail "$node is not in /etc/hosts"
job() { # NAME STEPS MORE...: the job that docs/deploy.md shows
  local name=$1 steps=$2
  shift 2
  sbatch "$@" --parsable --ntasks=3 --cpus-per-task=1 --output="$scratch/$name-%j.log" \
    examples/slurm/run.sbatch examples/arithmetic.yaml --set run.directory="$scratch/runs" \
    --set run.name="$name" --set run.steps="$steps" --set evaluation.prompts=32
}
state() { scontrol show job "$1" | grep -o 'JobState=[A-Z]*'; }
ended() { case $(state "$1") in *RUNNING|*PENDING|*COMPLETING) return 1 ;; esac; }
steps_of() { cat "$scratch/runs/$1/metrics.jsonl" 2>/dev/null | wc -l; }
reached() { [ "$(steps_of "$1")" -ge "$2" ]; }

first=$(job first 6)
until_true 300 "the end of job $first" ended "$first"
[ "$(state "$first")" = JobState=COMPLETED ] || fail "job $first ended: $(state "$first")"
[ "$(steps_of first)" = 6 ] || fail "$(steps_of first) steps in place of 6"
[ "$(jq .exactly_on_policy "$scratch/runs/first/metrics.jsonl" | sort -u)" = true ] || fail "not exactly on-policy"
passed "a job of three agents trained 6 steps, exactly on-policy"

second=$(job second 30)
until_true 300 "step 3 of job $second" reached second 3
scancel --batch --signal=TERM "$second"
until_true 120 "the end of job $second" ended "$second"
before=$(steps_of second)
[ "$before" -lt 30 ] || fail "the run was over before the signal"
[ "$(state "$second")" = JobState=COMPLETED ] || fail "job $second ended: $(state "$second")"
ls -d "$scratch"/runs/second/checkpoints/*/ >/dev/null || fail "the run left no checkpoint"
passed "a signal as before the time limit ended the run after step $before, with a checkpoint"
third=$(job second 30)
until_true 300 "the end of job $third" ended "$third"
[ "$(state "$third")" = JobState=COMPLETED ] || fail "job $third ended: $(state "$third")"
[ "$(steps_of second)" = 30 ] || fail "$(steps_of second) steps in place of 30"
passed "the same command continued it to step 30"
if pgrep -f "asyncrl (agent|run) .*$scratch" >/dev/null; then fail "processes are left"; fi
ls "$HOME"/.asyncrl-*.key >/dev/null 2>&1 && fail "a key is left in $HOME"
passed "nothing is left"

trap - ERR EXIT
end
rm -rf "$scratch"
echo "VERDICT: passed, $checks checks"
