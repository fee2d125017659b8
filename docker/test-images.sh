#!/usr/bin/env bash
# Runs what `make images` built: the server alone (ready, user, read-only, answer, health, killed engine, drain), llama.cpp in it (which of
# its builds was taken, an answer, load and a campaign from the load image, a page from the report image, kill -9), then the stack of
# compose.yaml, with what Prometheus saw. In a network namespace of its own: no port collides and nothing reaches a network.
# Needs: podman, runc, unshare, ip, curl. podman-compose comes from PyPI into an environment of its own: Debian 12 has 1.0.3, which gives
# a service on the host's network a bridge as well. What this machine cannot do is said by name, and is no failure.
# VENV, PYTHON, PIP_FLAGS as for make
set -euo pipefail
cd "$(dirname "$0")"
export CONTAINERS_CONF=${CONTAINERS_CONF:-$PWD/containers.conf}
export CROSSOVER_IMAGE=${CROSSOVER_IMAGE:-localhost/crossover:cpu} LOAD_IMAGE=${LOAD_IMAGE:-localhost/crossover:load}
export REPORT_IMAGE=${REPORT_IMAGE:-localhost/crossover:report} PROMETHEUS_IMAGE=${PROMETHEUS_IMAGE:-localhost/prometheus}
export LOAD_RATE=${LOAD_RATE:-2}
for tool in podman runc unshare:util-linux ip:iproute2 curl; do
  command -v "${tool%:*}" >/dev/null || { echo "test-images: not run, this machine has no ${tool%:*} (Debian: apt-get install ${tool#*:})"; exit 0; }
done
for image in "$CROSSOVER_IMAGE" "$LOAD_IMAGE" "$REPORT_IMAGE" "$PROMETHEUS_IMAGE"; do
  podman image exists "$image" || { echo "test-images: not run, there is no image $image (make images)"; exit 0; }
done
venv=${VENV:-.venv}
[[ $venv = /* ]] || venv=$PWD/../$venv
compose_at=$venv/podman-compose
# shellcheck disable=SC2086  # several flags
install_compose() { "${PYTHON:-python3}" -m venv "$compose_at" && "$compose_at/bin/pip" install --quiet ${PIP_FLAGS:-} podman-compose==1.6.0; }
if [[ ${1:-} != inside ]]; then
  [[ -x $compose_at/bin/podman-compose ]] || install_compose || true
  unshare -n -m --propagation private true 2>/dev/null || { echo "test-images: not run, this user may not make a network namespace"; exit 0; }
  exec unshare -n -m --propagation private "$PWD/${0##*/}" inside
fi
ip link set lo up
step() { printf '%6ss  %s\n' "$SECONDS" "$*"; }
log=$(mktemp)  # of the last command
fail() { tail -n 20 "$log"; echo "test-images: FAILED: $*"; exit 1; } >&2
wait_for() { for _ in $(seq 240); do curl -sf -o /dev/null "$1" && return; sleep 0.5; done; fail "$1 does not answer"; }

run() {  # as in production: read-only root, no capabilities; a volume each for weights and runs
  podman run --network host --read-only --tmpfs /tmp --cap-drop all --security-opt no-new-privileges --memory 2g --pids-limit 300 \
    -v crossover-test-cache:/cache -v crossover-test-runs:/runs "$@"
}
clean() {
  podman rm -f -t 0 crossover-test >/dev/null 2>&1 || true
  podman volume rm -f crossover-test-cache crossover-test-runs >/dev/null 2>&1 || true
}
post() { curl -s "${@:2}" http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d "$1"; }
answers() {
  post '{"prompt": "Hello", "max_tokens": 8, "ignore_eos": true}' -f | grep '"completion_tokens":8' >/dev/null || fail "no completion of 8 tokens $1"
}
inside() { podman exec crossover-test python3 -c "$1"; }
trap clean EXIT
clean

run -d --name crossover-test "$CROSSOVER_IMAGE" serve 135m --host 0.0.0.0 >/dev/null
wait_for http://127.0.0.1:8000/ready
step "135m ready, without capabilities"
[[ $(podman exec crossover-test id -u) = 10001 ]] || fail "the server does not run as user 10001"
[[ $(inside 'import os; print(os.statvfs("/").f_flag & os.ST_RDONLY)') = 1 ]] || fail "the root is not read-only"
podman healthcheck run crossover-test || fail "HEALTHCHECK fails on a server that is ready"
answers "from a server that is ready"
step "answers, healthy, read-only, as user 10001"

inside '
import os, pathlib, signal
engines = [int(p.parent.name) for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if b"-m\0crossover.serving.engine.engine_loop" in p.read_bytes()]
assert len(engines) == 1, engines
os.kill(engines[0], signal.SIGKILL)'
for _ in $(seq 100); do curl -s http://127.0.0.1:8000/metrics | grep '^crossover_engine_restarts_total{.*} [1-9]' >/dev/null && break; sleep 0.1; done
wait_for http://127.0.0.1:8000/ready
answers "after the engine was killed"
curl -s http://127.0.0.1:8000/metrics | grep '^crossover_engine_restarts_total{.*} 1' >/dev/null || fail "no restart of the engine in /metrics"
step "kill -9 of the engine: started again, answers"

stream=$(mktemp)
post '{"prompt": "Hello", "max_tokens": 100, "ignore_eos": true, "stream": true}' -N >"$stream" &
reader=$!
for _ in $(seq 100); do [[ -s $stream ]] && break; sleep 0.05; done
podman stop -t 40 crossover-test >/dev/null
wait "$reader" || fail "the stream under way was cut by SIGTERM"
grep -q 'data: \[DONE\]' "$stream" || fail "the stream under way did not end after SIGTERM"
[[ $(podman inspect -f '{{.State.ExitCode}}' crossover-test) = 0 ]] || fail "the server did not exit with 0 after SIGTERM"
step "SIGTERM drains a stream under way, exit status 0"
podman rm crossover-test >/dev/null

chosen='
import importlib.util, pathlib
assert importlib.util.find_spec("torch") is None, "torch is in the image"
from crossover.serving.backends.llama_cpp.library import build_details, library
llama = library()
files = sorted(path.stem.removeprefix("libggml-cpu-") for path in pathlib.Path(llama.__file__).parent.glob("lib/libggml-cpu-*.so"))
taken = {line.split("libggml-cpu-")[-1].split(".")[0] for line in open("/proc/self/maps") if "libggml-cpu-" in line}
details = build_details(llama)
assert len(files) > 1 and len(taken) == 1 and details["system_info"], (files, taken, details)
print(*taken, "of", *files, "|", details["system_info"])'
taken=$(podman run --rm --network none --entrypoint python3 "$CROSSOVER_IMAGE" -c "$chosen")
step "llama.cpp here takes $taken"
case $(uname -m) in
  x86_64) emulated="Nehalem:sse42 Haswell:haswell" ;;
  aarch64) emulated="cortex-a72:armv8.0_1 neoverse-n1:armv8.2_2 a64fx:armv8.2_3 max:armv8.6_2" ;;
  *) emulated= ;;
esac
if qemu=$(command -v "qemu-$(uname -m)-static") && [[ -n $emulated ]]; then
  for pair in $emulated; do
    taken=$(podman run --rm --network none --entrypoint /qemu -v "$qemu:/qemu:ro" "$CROSSOVER_IMAGE" -cpu "${pair%:*}" /opt/crossover/bin/python3 -c "$chosen" 2>"$log") || fail "llama.cpp on an emulated ${pair%:*}"
    [[ ${taken%% *} = "${pair#*:}" ]] || fail "on an emulated ${pair%:*} llama.cpp takes $taken"
    step "llama.cpp on an emulated ${pair%:*} takes ${taken%% *}"
  done
else
  step "which build other CPUs take was not run, this machine has no qemu-$(uname -m)-static (qemu-user-static)"
fi
run -d --name crossover-test "$CROSSOVER_IMAGE" serve 135m --host 0.0.0.0 --backend llama_cpp >/dev/null
wait_for http://127.0.0.1:8000/ready
answers "from llama.cpp"
step "llama.cpp answers"
run --rm "$LOAD_IMAGE" load http://127.0.0.1:8000 --rate 1 --duration 10 --workload 64x16 >"$log" 2>&1 || fail "crossover load"
step "load: requests at 1/s from the load image"
campaign=$(mktemp)
cat >"$campaign" <<'END'
name = "images"
budget_seconds = 30
disturbance = "ignore"
slo = "chat"
workload = { prompt_tokens = 16, output_tokens = 4 }
[target]
url = "http://127.0.0.1:8000"
[search]
starts = 1
level_seconds = 4
single_stream_requests = 3
END
chmod 644 "$campaign"
run --rm -v "$campaign:/campaign.toml:ro" "$LOAD_IMAGE" campaign run /campaign.toml --out /runs >"$log" 2>&1 || fail "crossover campaign run"
# shellcheck disable=SC2016  # sh's, inside the image
run --rm --entrypoint sh "$REPORT_IMAGE" -c 'crossover report /runs/*/ && test -s /runs/*/report/index.html' >"$log" 2>&1 || fail "crossover report"
step "campaign from the load image, page from the report image"
podman kill -s KILL crossover-test >/dev/null
for _ in $(seq 100); do [[ $(podman inspect -f '{{.State.Status}}' crossover-test) = exited ]] && break; sleep 0.1; done
podman start crossover-test >/dev/null
wait_for http://127.0.0.1:8000/ready
answers "after kill -9 of the container"
step "kill -9 of the container: started again with the same weights, answers"
clean

[[ -x $compose_at/bin/podman-compose ]] || { echo "test-images: the stack was not run, podman-compose could not be installed into $compose_at"; exit 0; }
export CROSSOVER_MODEL=${CROSSOVER_MODEL:-135m}
compose() { "$compose_at/bin/podman-compose" --in-pod false -f compose.yaml -f compose.loopback.yaml "$@"; }
# podman-compose leaves containers of an earlier run, and of `--scale`, behind.
remove_stack() { podman ps -aq --filter 'name=^crossover_' | xargs -r podman rm -f --depend -t 0 >/dev/null 2>&1 || true; }
remove_stack
trap 'compose logs server 2>&1 | tail -n 5; compose down -v -t 40 >/dev/null 2>&1; remove_stack; clean' EXIT
compose up -d --scale locust-worker=2 server locust-master locust-worker prometheus >/dev/null 2>&1
wait_for http://127.0.0.1:8000/ready
wait_for http://127.0.0.1:9090/-/ready
step "stack is up"
query() { curl -s --data-urlencode "query=$1" http://127.0.0.1:9090/api/v1/query | python3 -c 'import json,sys; d=json.load(sys.stdin)["data"]["result"]; print(d[0]["value"][1] if d else "nothing")'; }
for _ in $(seq 120); do
  ended=$(query 'sum(crossover_request_success_total)')
  [[ $ended != nothing && ${ended%.*} -gt 0 ]] && break
  sleep 1
done
[[ $(query 'up{job="crossover"}') = 1 ]] || fail "Prometheus does not scrape the server"
[[ $ended != nothing && ${ended%.*} -gt 0 ]] || fail "Prometheus saw no request that ended ($ended)"
step "Prometheus saw $ended requests of Locust end"
