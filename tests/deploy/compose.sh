#!/usr/bin/env bash
# docker/compose.yaml for real: builds the image and trains the example in containers; then a longer run
# of two generators whose containers are killed, which is ended and continued. Checks what both did.
# Ends in a line `VERDICT: ...`.
#
#   tests/deploy/compose.sh
#
# With a Docker daemon on this machine (25 or newer, Compose 2.24, curl, jq, and root, to kill processes of
# containers) it uses that, and the images of docker/compose.yaml from their registries. Without one, it
# needs what dockerd.sh and substitutes.sh need: then Prometheus is Debian's, and there is no
# Grafana, whose image is in no package registry. Half an hour on two cores, a third of it for the image.
# Everything that it makes is called asyncrl-test; containers, volumes and networks are removed at
# the end, the image stays.
#   STEPS   optimizer steps of the first run (default 30)
#   SAVE    file for the image, as asyncrl:test, which kubernetes.sh takes (in DEPLOY_DIR)
#   DEPLOY_DIR, TORCH_INDEX   see the other two scripts
# With pipefail, a reader that ends early (head, grep -q) would fail its writer by SIGPIPE: they read all.
set -Eeuo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
if [ -z "${ASYNCRL_OWN_DAEMON:-}" ] && ! docker info >/dev/null 2>&1; then
  export DEPLOY_DIR=${DEPLOY_DIR:-/var/tmp/asyncrl-deploy}
  mkdir -p "$DEPLOY_DIR"
  "$here/dockerd.sh" true
  "$here/substitutes.sh"
  exec "$here/dockerd.sh" tests/deploy/compose.sh
fi

export BUILDX_GIT_INFO=false ASYNCRL_IMAGE=asyncrl-test ASYNCRL_RUN=first ASYNCRL_STEPS=${STEPS:-30}
export ASYNCRL_WEB_PORT=${ASYNCRL_WEB_PORT:-18080} GRAFANA_PORT=${GRAFANA_PORT:-13000}
files=(-f docker/compose.yaml)
services=(controller trainer generator prometheus)
scratch=$(mktemp -d)
checks=0
began=$SECONDS

dc() { docker compose -p asyncrl-test "${files[@]}" "$@"; }
say() { printf '%s %s\n' "$(date +%T)" "$*"; }
passed() { checks=$((checks + 1)); say "ok: $*"; }
fail() {
  say "FAILED: $*" >&2
  set +e
  trap - ERR EXIT
  dc ps -a >&2
  dc logs --no-color --tail 25 >&2
  [ "${KEEP:-}" ] || dc down --volumes --timeout 30 >/dev/null 2>&1
  echo "VERDICT: failed after $checks checks: $*"
  exit 1
}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
trap '[ "$BASHPID" != $$ ] || echo "VERDICT: failed after $checks checks: ended early"' EXIT

in_controller() { dc exec -T controller "$@"; }
status() { in_controller asyncrl status --json 2>/dev/null || echo '{}'; }
step() { status | jq -r '.step // 0'; }
ready_generators() {
  status | jq '[.processes // {} | to_entries[] | select(.key | startswith("generator")) | select(.value.state == "ready")] | length'
}
until_true() {  # SECONDS WHAT COMMAND...: wait until COMMAND succeeds
  local limit=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@"; do
    [ $SECONDS -lt $end ] || fail "waited $limit s for $what"
    case "$(docker inspect -f '{{.State.Status}} {{.State.ExitCode}}' "$(dc ps -aq controller)" 2>/dev/null)" in
      "exited 0") [ "${MAY_END:-}" ] || fail "the run ended before $what" ;;
    esac
    sleep 1
  done
}
step_is() { [ "$(step)" -ge "$1" ]; }
generators_are() { [ "$(ready_generators)" = "$1" ]; }
restarted() { [ "$(docker inspect -f '{{.RestartCount}}' "$1")" -gt "$2" ] && [ "$(docker inspect -f '{{.State.Running}}' "$1")" = true ]; }

crash() {  # SERVICE: its first container dies as if it had run out of memory, and Docker starts it again
  local id count
  id=$(dc ps -q "$1" | sed -n 1p)
  count=$(docker inspect -f '{{.RestartCount}}' "$id")
  kill -KILL "$(docker inspect -f '{{.State.Pid}}' "$id")"
  until_true 120 "Docker to start $1 again" restarted "$id" "$count"
}

build() {
  if [ -z "${ASYNCRL_OWN_DAEMON:-}" ]; then dc build --quiet keys; return; fi
  export PROMETHEUS_IMAGE=asyncrl-test-prometheus
  files+=(-f "$DEPLOY_DIR/no-grafana.yaml")
  printf 'services: {grafana: !reset null}\n' >"$DEPLOY_DIR/no-grafana.yaml"
  printf '[global]\nno-index = true\n' >"$DEPLOY_DIR/pip.conf"
  docker import --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    "$DEPLOY_DIR/base.tar" asyncrl-test-base >/dev/null
  docker import --change 'ENTRYPOINT ["/usr/bin/prometheus"]' --change 'ENV PATH=/usr/bin:/bin' \
    "$DEPLOY_DIR/prometheus.tar" asyncrl-test-prometheus-only >/dev/null
  # As in prom/prometheus, the folder of its data belongs to its user.
  docker build --quiet --tag asyncrl-test-prometheus - >/dev/null <<'DOCKERFILE'
FROM asyncrl-test-prometheus-only
RUN install --directory --owner=65534 --group=65534 /prometheus
DOCKERFILE
  docker build --quiet --file docker/Dockerfile --tag asyncrl-test --build-arg BASE=asyncrl-test-base \
    --build-arg TORCH_INDEX= --build-context "wheels=$DEPLOY_DIR/wheels" \
    --secret "id=pip.conf,src=$DEPLOY_DIR/pip.conf" . >/dev/null
}

up() { dc up --wait --wait-timeout 900 --no-build --quiet-pull "$@" >"$scratch/up.log" 2>&1 || fail "up $*: $(tail -5 "$scratch/up.log")"; }

# Isolation, as the kernel and Docker have it, not as the file asks for it.
check_containers() {
  local service id found secrets
  for service in "${services[@]}"; do
    id=$(dc ps -q "$service" | sed -n 1p)
    found=$(docker inspect -f '{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}}' "$id")
    [ "$found" = "true [ALL] [no-new-privileges:true]" ] || fail "$service: $found"
    # Of process 1 and, below --init, of its child.
    docker exec "$id" sh -c 'for s in /proc/[0-9]*/status; do grep -E "^(Uid|CapEff|CapBnd|NoNewPrivs):" $s; done' \
      | sort -u >"$scratch/rights"
    ! grep -qE '^Uid:\s+0\s' "$scratch/rights" || fail "$service has processes of root"
    ! grep -E '^Cap' "$scratch/rights" | grep -qv 0000000000000000 || fail "$service has capabilities"
    ! grep -qE '^NoNewPrivs:\s+0' "$scratch/rights" || fail "$service could gain rights"
    if docker exec "$id" sh -c 'echo > /probe' 2>/dev/null; then fail "$service can write to its root file system"; fi
    [ "$(docker inspect -f '{{.HostConfig.Memory}}' "$id")" -gt 0 ] || fail "$service has no limit of memory"
  done
  passed "${services[*]}: no root, no capability, read-only, limited"
  found=$(docker ps --filter label=com.docker.compose.project=asyncrl-test --format '{{.Ports}}' | grep -oE '[^ ,]+->' | sort -u | tr '\n' ' ')
  ! printf %s "$found" | grep -vqE '^(127\.0\.0\.1:[0-9]+-> ?)+$' || fail "published ports: $found"
  passed "published: $found"
  secrets="$(in_controller cat /keys/web/token) $(in_controller python -c 'print(open("/keys/agents/key","rb").read().hex())')"
  for found in $secrets; do
    ! dc logs --no-color | grep -F "$found" >/dev/null || fail "a secret is in the logs"
    ! docker inspect $(dc ps -aq) | grep -F "$found" >/dev/null || fail "a secret is in docker inspect"
    ! for id in $(dc ps -q); do docker exec "$id" sh -c 'cat /proc/[0-9]*/cmdline'; done | grep -aF "$found" >/dev/null || fail "a secret is in a command line"
  done
  [ -z "$(docker run --rm --network none --entrypoint find asyncrl-test /keys -type f)" ] || fail "the image has keys"
  passed "the secrets are in no log, no command line, no environment and not in the image"
}

check_page() {
  local url=http://127.0.0.1:$ASYNCRL_WEB_PORT token
  token=$(in_controller cat /keys/web/token)
  [ "$(curl -s -o /dev/null -w '%{http_code}' "$url/")" = 200 ] || fail "the web page does not answer"
  [ "$(curl -s -o /dev/null -w '%{http_code}' "$url/api/status")" = 401 ] || fail "the API answers without a token"
  curl -sf -H @- "$url/api/status" <<<"Authorization: Bearer $token" | jq -e '.step >= 0' >/dev/null || fail "the API refuses the token"
  passed "web page on $url, its API with the token only"
}

promql() { dc exec -T prometheus promtool query instant http://127.0.0.1:9090 "$1" 2>/dev/null; }
prometheus_sees() { [ "$(promql "count(up{run=\"second\"} == 1)" | grep -oE '=> [0-9]+' | grep -oE '[0-9]+')" = "$1" ] 2>/dev/null; }
prometheus_steps() { [ "$(promql 'asyncrl_steps_total{run="second"}' | grep -oE '=> [0-9]+' | grep -oE '[0-9]+')" -ge 1 ] 2>/dev/null; }

say "building the image"
build
if [ -n "${SAVE:-}" ]; then
  mkdir -p "$(dirname "$SAVE")"
  docker tag asyncrl-test asyncrl:test
  docker save asyncrl:test >"$SAVE"
fi
passed "image of $(docker image inspect -f '{{.Size}}' asyncrl-test | numfmt --to=si)B after $((SECONDS - began)) s"
dc config --quiet
dc -f docker/compose.gpu.yaml config --quiet
passed "docker compose accepts compose.yaml and compose.gpu.yaml"

dc down --volumes >/dev/null 2>&1 || true
run_rm() { docker run --rm --network none --read-only -v asyncrl-test_runs:/work/runs:ro --entrypoint "$1" asyncrl-test "${@:2}"; }
records_are_whole() {  # RUN: steps 0, 1, ..., each once, and each of their 16 groups in one of them
  run_rm cat "/work/runs/$1/metrics.jsonl" \
    | jq -se '[.[].step] == [range(length)] and ([.[].groups.trained[]] | sort) == [range(16 * length)] and all(.exactly_on_policy)' >/dev/null
}
controller_exited() { [ "$(docker inspect -f '{{.State.Status}}' "$(dc ps -aq controller)")" = exited ]; }
end_of_run() {
  MAY_END=1 until_true 1200 "the end of the run" controller_exited
  [ "$(docker inspect -f '{{.State.ExitCode}}' "$(dc ps -aq controller)")" = 0 ] || fail "the controller failed"
}

start=$SECONDS
up
passed "up --wait: the first run trains after $((SECONDS - start)) s, the making of the model included"
end_of_run
result=$(run_rm cat /work/runs/first/result.json)
jq -e --argjson n "$ASYNCRL_STEPS" '.steps == $n and .exactly_on_policy == true and .groups.failed == 0 and .groups.trained == 16 * $n and .accuracy_after > .accuracy_before' <<<"$result" >/dev/null \
  || fail "result.json: $result"
records_are_whole first || fail "metrics.jsonl does not have each group once"
passed "it is complete after $((SECONDS - start)) s: $(jq -c '{steps, exactly_on_policy, groups, accuracy_before, accuracy_after}' <<<"$result")"

export ASYNCRL_RUN=second ASYNCRL_STEPS=1000000
start=$SECONDS
up
passed "up --wait: the second run trains after $((SECONDS - start)) s"
until_true 60 "one generator" generators_are 1
check_containers
check_page
until_true 300 "step 2" step_is 2
until_true 120 "Prometheus to see its steps" prometheus_steps
passed "Prometheus has the run: $(promql 'asyncrl_steps_total{run="second"}')"
if [ -z "${ASYNCRL_OWN_DAEMON:-}" ]; then
  curl -sfL "http://localhost:$GRAFANA_PORT/api/search?query=" | jq -e 'length > 0' >/dev/null || fail "Grafana has no dashboard"
  passed "Grafana serves the dashboard"
fi

up --scale generator=2
until_true 300 "two generators" generators_are 2
passed "--scale generator=2: asyncrl status says that two are ready, at step $(step)"
# Controller, trainer, two generators, and the relay of each of three agents.
until_true 120 "Prometheus to reach every process" prometheus_sees 7
passed "Prometheus reaches all 7 processes, in 4 containers"

for service in generator trainer controller prometheus; do
  before=$(step)
  crash "$service"
  until_true 600 "two more steps after $service was killed at step $before" step_is $((before + 2))
  passed "$service killed at step $before, Docker started it again, and step $(step) is done"
done
until_true 300 "two generators" generators_are 2

start=$SECONDS
dc down >"$scratch/down.log" 2>&1
steps=$(run_rm sh -c 'wc -l < /work/runs/second/metrics.jsonl')
kept=$(run_rm sh -c 'ls /work/runs/second/checkpoints' | tail -n 1)
passed "down after $((SECONDS - start)) s, $steps steps done; newest checkpoint: $kept"

start=$SECONDS
up --scale generator=2
passed "up --wait continues it after $((SECONDS - start)) s"
until_true 300 "two more steps" step_is $((steps + 2))
dc logs --no-color controller >"$scratch/controller.log"
grep -iE 'resum|continu' "$scratch/controller.log" | head -n 2 || true
in_controller asyncrl stop >/dev/null
end_of_run
records_are_whole second || fail "metrics.jsonl does not have each group once"
passed "ended at $(run_rm sh -c 'wc -l < /work/runs/second/metrics.jsonl') steps; each group of each step was trained on once"

dc down --volumes --remove-orphans >/dev/null 2>&1
left=$(docker ps -aq --filter label=com.docker.compose.project=asyncrl-test; docker volume ls -q --filter label=com.docker.compose.project=asyncrl-test)
[ -z "$left" ] || fail "down --volumes left $left"
passed "down --volumes leaves nothing"
trap - EXIT
echo "VERDICT: passed, $checks checks in $((SECONDS - began)) s"
