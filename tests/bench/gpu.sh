#!/usr/bin/env bash
# What only a GPU can prove, in calls which can be made in any order and again: a call that has ended well is not made twice, and what a call
# keeps is in FOLDER as it comes.
#
#   tests/bench/gpu.sh FOLDER carry          where there is a network: the wheels of gpu_wheels.txt to FOLDER/wheels
#   tests/bench/gpu.sh FOLDER [CALL...]      where the GPU is, without a network; no CALL: the next one that is not done
#   tests/bench/gpu.sh FOLDER --device cpu   the rehearsal: every call on a CPU, with a small model and few steps
#
#   weights  random weights of the models below in every format that the other calls use
#   tests    what is marked gpu: bf16, flash attention, captured and launched steps, copies: the tokens of transformers; memory refused
#   floor    the share of the floor that memory bandwidth sets, 1B, 3B and 8B at 1, 8, 32 and 128 rows, with and without the flash kernels;
#            memory and time of each load
#   faults   over HTTP: kill -9, memory taken by another process: causes and times
#   campaign 1B and 8B on both devices of the machine, about 150 s of measuring; the run folder and its report
#
# PYTHON: the interpreter, python3 where it is not said. CORES: of every engine, "2 3 4 5". CROSSOVER_CACHE: where weights are made, in RAM.
# CALL_SECONDS, WHEELS_MIB: a machine with a GPU is often had for minutes only, so a call that takes longer is ended, 235, and wheels that are
# more to carry there are told, 64.
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
  "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_34_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
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
  [[ -e $out/site/.complete ]] || "$python" -m pip install --quiet --no-index --no-deps --find-links "$out/wheels" --target "$out/site" \
    --requirement "$here/gpu_wheels.txt"
  touch "$out/site/.complete"
  export PYTHONPATH=$out/site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} CROSSOVER_CACHE=${CROSSOVER_CACHE:-/dev/shm/crossover} HF_HUB_OFFLINE=1
read -r -a cores <<<"${CORES:-2 3 4 5}"
big=8b models=(llama-3.2-1b llama-3.2-3b llama-3.1-8b) rows=(1 8 32 128) steps=64 rounds=3
measured='"llama-3.2-1b", "llama-3.1-8b"' devices='"cpu", "gpu"' campaign_seconds=150
if [[ $device == cpu ]]; then
  big=135m models=(smollm2-135m) rows=(1 2) steps=4 rounds=1
  measured='"smollm2-135m"' devices='"cpu"' campaign_seconds=60
  read -r -a cores <<<"${CORES:-0}"
else
  "$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no GPU here")'
  nvidia-smi -q > "$out/nvidia-smi.txt" || true
fi

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
  "$python" -m crossover campaign run "$out/campaign.toml" --out "$out/runs"
  run=$(ls -td "$out"/runs/*/ | head -n 1)
  "$python" -m crossover campaign show "$run"
  "$python" -m crossover report "$run" --out "$out/page"
}

call() {
  case $1 in
  weights)
    "$python" -m crossover models make --backend torch "${models[@]}"
    "$python" -m crossover models make --backend onnx "${models[0]}" "$big"
    ;;
  tests)
    "$python" -m pytest tests/serving/backends/torch -m gpu -p no:cacheprovider \
      -o filterwarnings=default
    ;;
  floor)
    for attention in auto sdpa; do
      "$python" -m tests.bench.torch_floor --device "$device" --attention "$attention" --models "${models[@]}" --rows "${rows[@]}" \
        --steps "$steps" --rounds "$rounds" --cores "${cores[@]}" --json "$out/floor-$attention.json"
    done
    ;;
  faults) "$python" -m tests.bench.gpu_faults --device "$device" --model "$big" --json "$out/faults.json" ;;
  campaign) campaign ;;
  *)
    echo "no call $1; there are weights tests floor faults campaign" >&2
    return 2
    ;;
  esac
}

if [[ ${1:-} == --only ]]; then  # this script, under the limit of one call
  call "$2"
  exit
fi
all=(weights tests floor faults campaign)
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
  timeout --kill-after 10 "$call_seconds" bash "$here/gpu.sh" "$out" --device "$device" --only "$one" >"$out/$one.txt" 2>&1 || status=$?
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
