#!/usr/bin/env bash
# What only a GPU can prove, in one go: the tests marked gpu, the torch engine against the floor that memory bandwidth sets, and against
# transformers' ContinuousBatching.
#
#   tests/bench/gpu.sh FOLDER     FOLDER gets the tables and every run as JSON
#
# Uses the environment of `make env` (PYTHON names another). Weights are made on the spot, 24 GB of them for the three models.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?name a folder for the results}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no GPU here")'
nvidia-smi -q > "$out/nvidia-smi.txt" || true
failed=0
"$python" -m pytest -m gpu -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || failed=1
"$python" -m tests.bench.torch_floor --device gpu --json "$out/floor.json" 2>&1 | tee "$out/floor.txt" || failed=1
for model in llama-3.2-1b llama-3.2-3b llama-3.1-8b; do
  "$python" -m tests.bench.torch_peers --device gpu --model "$model" --dtypes bfloat16 --peers continuous-sdpa --workloads 1 8 32 128 --rounds 3 \
    --json "$out/peers-$model.json" 2>&1 | tee "$out/peers-$model.txt" || failed=1
done
exit $failed
