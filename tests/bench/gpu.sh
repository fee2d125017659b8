#!/usr/bin/env bash
# Measures what only a GPU can show, on a machine that is had for 15 minutes and has no network.
#
# Before, where there is a network:    tests/bench/gpu.sh FOLDER carry
#   fetches the wheels of gpu_wheels.txt to FOLDER/wheels (the machine has Python 3.12 and torch).
# On the machine, as often as needed:  tests/bench/gpu.sh FOLDER [CALL...]
#   makes the calls that are named, or the next one that is not done. In 15 minutes:
#   `weights tests`, `steps`, `cpu-weights faults`, `campaign`, and `floor` with what is left.
# Rehearsal on any machine:            tests/bench/gpu.sh FOLDER --device cpu
#   makes every call on the CPU, with a small model and few steps.
#
# A call that ended well is not made again. Each is ended after CALL_SECONDS, its parts after limits
# of their own, so that nothing blocks. What it printed is FOLDER/CALL.txt; figures are kept in
# FOLDER as they come.
#
#   weights      random weights of 135M, 1B and 8B in bf16
#   tests        pytest -m gpu: bf16, flash attention, captured and launched steps, copies give the
#                tokens of transformers; memory that does not suffice is refused
#   steps        milliseconds of steps by what is in them, a burst, memory and time of the load
#   cpu-weights  weights of 1B and 8B for the CPU's engine, which `faults` and `campaign` use
#   faults       over HTTP with 1B: the engine is killed (the CPU may answer until it is back), and
#                killed while another process holds the memory: causes and times
#   campaign     1B and 8B on both devices, about 150 s of measuring; the run and its report
#   floor        the share of the floor that memory bandwidth sets
#
# PYTHON: the interpreter (python3). CORES: of every engine ("2 3 4 5"). CROSSOVER_CACHE: where
# weights are made (/dev/shm/crossover, in RAM: 25 GB). CALL_SECONDS: 235. WHEELS_MIB: more wheels
# than this are reported (64).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?name a folder for the results}
shift
python=${PYTHON:-python3}
call_seconds=${CALL_SECONDS:-235}
wheels_mib=${WHEELS_MIB:-64}
mkdir -p "$out"
out=$(realpath "$out")
here=tests/bench
if [[ ${1:-} == carry ]]; then
  "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 \
    --platform manylinux_2_31_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform any \
    --dest "$out/wheels" --requirement "$here/gpu_wheels.txt"
  mib=$(du -sm "$out/wheels" | cut -f1)
  echo "$(find "$out/wheels" -name '*.whl' | wc -l) wheels, $mib MiB"
  [[ $mib -le $wheels_mib ]] || echo "that is more than $wheels_mib MiB (WHEELS_MIB)" >&2
  exit 0
fi
device=gpu
if [[ ${1:-} == --device ]]; then
  device=${2:?gpu or cpu}
  shift 2
fi
if [[ -d $out/wheels ]]; then
  [[ -e $out/site/.complete ]] || timeout 120 "$python" -m pip install --quiet --no-index \
    --no-deps --find-links "$out/wheels" --target "$out/site" \
    --requirement "$here/gpu_wheels.txt"
  touch "$out/site/.complete"
  export PYTHONPATH=$out/site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export CROSSOVER_CACHE=${CROSSOVER_CACHE:-/dev/shm/crossover} HF_HUB_OFFLINE=1
read -r -a cores <<<"${CORES:-2 3 4 5}"
models=(smollm2-135m llama-3.2-1b llama-3.1-8b) served=1b stepped=(1b 8b) quick=()
campaigned=(llama-3.2-1b llama-3.1-8b) rows=(1 8 32 128) steps=64 rounds=3
measured='"llama-3.2-1b", "llama-3.1-8b"' devices='"cpu", "gpu"' campaign_seconds=150
if [[ $device == cpu ]]; then
  models=(smollm2-135m) served=135m stepped=(135m) quick=(--quick)
  campaigned=(smollm2-135m)
  rows=(1 2) steps=4 rounds=1
  measured='"smollm2-135m"' devices='"cpu"' campaign_seconds=60
  read -r -a cores <<<"${CORES:-0}"
else
  timeout 60 "$python" -c 'import torch; assert torch.cuda.is_available(), "no GPU for torch here"'
  # pyproject.toml sets a limit for each test, which pytest refuses without its plugin.
  timeout 60 "$python" -c 'import pytest_timeout'
  timeout 60 "$python" -c 'import onnx, onnxruntime, scipy' ||
    echo "cpu-weights and campaign need onnx, onnxruntime and scipy" >&2
  timeout 20 nvidia-smi -q > "$out/nvidia-smi.txt" || true
fi

limited() {  # SECONDS COMMAND...
  timeout --kill-after 5 "$@"
}

campaign() {  # torch on the GPU, onnx on the CPU; without a GPU both on the CPU
  cat >"$out/campaign.toml" <<END
name = "both-devices"
models = [$measured]
devices = [$devices]
backends = ["torch", "onnx"]
budget_seconds = $campaign_seconds
disturbance = "ignore"
slo = { name = "chat", ttft_seconds = 1.0, tpot_seconds = 0.1, target = 0.95 }
workload = { preset = "sharegpt", max_prompt_tokens = 512, max_output_tokens = 256 }
search = { single_stream_requests = 10, single_stream_seconds = 6 }
server.context_tokens = 1024
END
  limited 215 "$python" -m crossover campaign run "$out/campaign.toml" --out "$out/runs"
  run=$(ls -td "$out"/runs/*/ | head -n 1)
  limited 30 "$python" -m crossover campaign show "$run"
  limited 60 "$python" -m crossover report "$run" --out "$out/page"
}

call() {
  case $1 in
  weights) limited 230 "$python" -m crossover models make --backend torch "${models[@]}" ;;
  cpu-weights)
    limited 230 "$python" -m crossover models make --backend onnx "${campaigned[@]}"
    ;;
  tests)
    limited 230 "$python" -m pytest tests/serving/backends/torch -m gpu -p no:cacheprovider \
      -o filterwarnings=default -o faulthandler_timeout=60
    ;;
  steps)
    limited 230 "$python" -m tests.bench.gpu_steps --device "$device" --models "${stepped[@]}" \
      "${quick[@]}" --json "$out/steps.json"
    ;;
  faults)
    limited 230 "$python" -m tests.bench.gpu_faults --device "$device" --model "$served" \
      --json "$out/faults.json"
    ;;
  campaign) campaign ;;
  floor)
    limited 230 "$python" -m tests.bench.torch_floor --device "$device" \
      --models "${campaigned[@]}" --rows "${rows[@]}" --steps "$steps" --rounds "$rounds" \
      --cores "${cores[@]}" --json "$out/floor.json"
    ;;
  *)
    echo "no call $1; there are ${all[*]}" >&2
    return 2
    ;;
  esac
}

all=(weights tests steps cpu-weights faults campaign floor)
if [[ ${1:-} == --only ]]; then  # this script, under the limit of one call
  call "$2"
  exit
fi
wanted=("$@")
if [[ ${#wanted[@]} == 0 ]]; then
  for one in "${all[@]}"; do
    if [[ ! -e $out/$one.done ]]; then
      wanted+=("$one")
      [[ $device == cpu ]] || break
    fi
  done
fi
failed=0
for one in "${wanted[@]}"; do
  [[ -e $out/$one.done ]] && continue
  status=0
  timeout --kill-after 10 "$call_seconds" bash "$here/gpu.sh" "$out" --device "$device" \
    --only "$one" >"$out/$one.txt" 2>&1 || status=$?
  tail -n 40 "$out/$one.txt"
  # 5: pytest has found no test to run, which is so without a GPU.
  if [[ $status == 0 || ($device == cpu && $one == tests && $status == 5) ]]; then
    touch "$out/$one.done"
  else
    echo "$one ended with status $status" >&2
    failed=1
  fi
done
exit $failed
