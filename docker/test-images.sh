#!/usr/bin/env bash
# Runs what docker/build.sh built: the server alone (ready, user, answer, health, drain), then the stack of compose.yaml, with what Prometheus
# saw. In a network namespace of its own, so no port collides and nothing reaches a network. Needs: podman, runc, unshare, podman-compose.
# What this machine cannot do is said by name, and is no failure.
set -euo pipefail
cd "$(dirname "$0")"
export CONTAINERS_CONF=${CONTAINERS_CONF:-$PWD/containers.conf}
export CROSSOVER_IMAGE=${CROSSOVER_IMAGE:-localhost/crossover:cpu} LOAD_IMAGE=${LOAD_IMAGE:-localhost/crossover:load}
export PROMETHEUS_IMAGE=${PROMETHEUS_IMAGE:-localhost/prometheus}
export CROSSOVER_MODEL=${CROSSOVER_MODEL:-fake} LOAD_RATE=${LOAD_RATE:-2}
for tool in podman runc unshare ip curl; do
  command -v "$tool" >/dev/null || { echo "test-images: not run, this machine has no $tool"; exit 0; }
done
if [[ ${1:-} != inside ]]; then
  unshare -n -m --propagation private true 2>/dev/null || { echo "test-images: not run, this user may not make a network namespace"; exit 0; }
  exec unshare -n -m --propagation private "$0" inside
fi
ip link set lo up
step() { printf '%6ss  %s\n' "$SECONDS" "$*"; }
fail() { echo "test-images: FAILED: $*" >&2; exit 1; }
wait_for() { for _ in $(seq 240); do curl -sf -o /dev/null "$1" && return; sleep 0.5; done; fail "$1 does not answer"; }

clean() { podman rm -f -t 0 crossover-test >/dev/null 2>&1 || true; }
trap clean EXIT
clean
podman run -d --name crossover-test --network host --read-only --tmpfs /tmp --tmpfs /cache:mode=1777 --cap-drop all \
  --security-opt no-new-privileges --memory 2g --pids-limit 300 "$CROSSOVER_IMAGE" serve "$CROSSOVER_MODEL" --host 0.0.0.0 >/dev/null
wait_for http://127.0.0.1:8000/ready
step "server ready, read-only, without capabilities"
[[ $(podman exec crossover-test id -u) = 10001 ]] || fail "the server does not run as user 10001"
podman healthcheck run crossover-test || fail "HEALTHCHECK fails on a server that is ready"
ask='{"model": "'$CROSSOVER_MODEL'", "prompt": "Hello", "max_tokens": 8}'
curl -sf http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d "$ask" | grep -q '"completion_tokens":8' || fail "no completion of 8 tokens"
step "answers, healthy, as user 10001"
stream=$(mktemp)
curl -sN http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
  -d '{"model": "'$CROSSOVER_MODEL'", "prompt": "Hello", "max_tokens": 100, "ignore_eos": true, "stream": true}' >"$stream" &
reader=$!
for _ in $(seq 100); do [[ -s $stream ]] && break; sleep 0.05; done
podman stop -t 40 crossover-test >/dev/null
wait "$reader" || fail "the stream under way was cut by SIGTERM"
grep -q 'data: \[DONE\]' "$stream" || fail "the stream under way did not end after SIGTERM"
[[ $(podman inspect -f '{{.State.ExitCode}}' crossover-test) = 0 ]] || fail "the server did not exit with 0 after SIGTERM"
step "SIGTERM drains a stream under way, exit status 0"
clean

command -v podman-compose >/dev/null || { echo "test-images: the stack was not run, this machine has no podman-compose"; exit 0; }
compose() { podman-compose --in-pod false -f compose.yaml -f compose.loopback.yaml "$@"; }
trap 'compose logs server 2>&1 | tail -n 5; compose down -v -t 40 >/dev/null 2>&1' EXIT
compose up -d server locust-master locust-worker prometheus >/dev/null 2>&1
wait_for http://127.0.0.1:8000/ready
wait_for http://127.0.0.1:8089/stats/requests
wait_for http://127.0.0.1:9090/-/ready
step "stack is up"
workers() { curl -s http://127.0.0.1:8089/stats/requests | python3 -c 'import json,sys; print(len(json.load(sys.stdin).get("workers", [])))'; }
for _ in $(seq 120); do [[ $(workers) -ge 1 ]] && break; sleep 0.5; done
[[ $(workers) -ge 1 ]] || fail "no Locust worker registered"
curl -sf http://127.0.0.1:8089/swarm -d user_count=1 -d spawn_rate=1 -d host=http://server:8000 >/dev/null || fail "Locust does not start"
sleep 30
query() { curl -s --data-urlencode "query=$1" http://127.0.0.1:9090/api/v1/query | python3 -c 'import json,sys; d=json.load(sys.stdin)["data"]["result"]; print(d[0]["value"][1] if d else "nothing")'; }
[[ $(query 'up{job="crossover"}') = 1 ]] || fail "Prometheus does not scrape the server"
ended=$(query 'sum(crossover_request_success_total)')
[[ $ended != nothing && ${ended%.*} -gt 0 ]] || fail "Prometheus saw no request that ended ($ended)"
step "Prometheus saw $ended requests of Locust end"
