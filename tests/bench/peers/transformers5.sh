#!/usr/bin/env bash
# An environment of its own for transformers 5, whose ContinuousBatching and generate() are peers of the torch engine: the project's own
# environment is held at transformers 4.57 by the ONNX exporter.
#
#   tests/bench/peers/transformers5.sh           # prints the path of its python
#   VERSION=5.23.0 PIP_FLAGS="--extra-index-url <PyTorch's CPU index>" tests/bench/peers/transformers5.sh
#
# It lies in $CROSSOVER_CACHE, $XDG_CACHE_HOME/crossover or ~/.cache/crossover, under peers/. The same torch as the engine's, which is
# installed first, so that a difference between the two is not torch's. A second call installs nothing.
set -euo pipefail

VERSION=${VERSION:-5.23.0}
TORCH=${TORCH:-2.13.0}
PYTHON=${PYTHON:-python3}
CACHE=${CROSSOVER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crossover}
PEERS=$CACHE/peers
VENV=$PEERS/transformers-$VERSION
LOG=$PEERS/transformers-$VERSION.log

mkdir -p "$PEERS"
exec 9>"$PEERS/.transformers5.lock"
flock 9

if [[ ! -e $VENV/.complete ]]; then
    rm -rf "$VENV"
    {
        "$PYTHON" -m venv "$VENV"
        # shellcheck disable=SC2086
        "$VENV/bin/python" -m pip install ${PIP_FLAGS:-} "torch==$TORCH" numpy psutil
        # shellcheck disable=SC2086
        "$VENV/bin/python" -m pip install ${PIP_FLAGS:-} "torch==$TORCH" "transformers==$VERSION" safetensors
    } >"$LOG" 2>&1 || {
        echo "the installation failed; the end of $LOG:" >&2
        tail -n 20 "$LOG" >&2
        exit 1
    }
    touch "$VENV/.complete"
fi
echo "$VENV/bin/python"
