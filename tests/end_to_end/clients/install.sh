#!/usr/bin/env bash
# Makes the environments of the clients that tests/end_to_end/test_clients.py and test_agents.py drive a server with: what is written against
# OpenAI's interface, and what is written to measure it. None of their dependencies is ours, so each has an environment of its own.
#
#   tests/end_to_end/clients/install.sh              # LangChain and LlamaIndex (350 MB), agents (204 MB), aider (569 MB), LiteLLM (200 MB), OpenAI's JavaScript client and
#                                                    # the AI SDK (40 MB, by npm), GuideLLM and AIPerf, and vLLM's benchmark client (1.9 GB)
#   tests/end_to_end/clients/install.sh frameworks   # all but the last
#
# Everything lies in $CROSSOVER_CACHE or ~/.cache/crossover, under peers/. A second call installs nothing. vLLM is installed without the packages that its GPU engine needs:
# `vllm bench serve` runs without them, on a machine without a GPU too.
set -euo pipefail

PYTHON=${PYTHON:-python3}
CACHE=${CROSSOVER_CACHE:-$HOME/.cache/crossover}
PEERS=$CACHE/peers
WHAT=${1:-all}
mkdir -p "$PEERS"
exec 9>"$PEERS/.clients.lock"
flock 9

install() {  # name, then the arguments of one pip install each, in order
    local place=$PEERS/$1
    shift
    [[ -e $place/.complete ]] && return 0
    rm -rf "$place"
    "$PYTHON" -m venv "$place"
    for what in "$@"; do
        # shellcheck disable=SC2086
        nice -n 19 "$place/bin/pip" install --quiet --no-compile ${PIP_FLAGS:-} $what >>"$place/install.log" 2>&1 || {
            echo "pip install $what failed; the end of $place/install.log:" >&2
            tail -n 20 "$place/install.log" >&2
            exit 1
        }
    done
    touch "$place/.complete"
}

javascript() {  # name, then packages of npm
    local place=$PEERS/$1
    shift
    [[ -e $place/.complete ]] && return 0
    command -v npm >/dev/null || { echo "no npm here: the clients in JavaScript are left out" >&2; return 0; }
    rm -rf "$place"
    mkdir -p "$place/bin"
    nice -n 19 npm install --prefix "$place" --no-audit --no-fund --silent "$@" >"$place/install.log" 2>&1 || {
        echo "npm install $* failed; the end of $place/install.log:" >&2
        tail -n 20 "$place/install.log" >&2
        exit 1
    }
    ln -s "$(command -v node)" "$place/bin/node"
    touch "$place/.complete"
}

install frameworks-1 "langchain-openai==1.7.3 llama-index-llms-openai==0.8.3 llama-index-llms-openai-like==0.8.1"
install agents-1 "langchain==1.5.2 langchain-openai==1.7.4 pydantic-ai-slim[openai]==2.38.0 openai-agents==0.24.0
                  smolagents[openai]==1.26.0 instructor==1.17.0 llm==0.36"
install aider-1 "aider-chat==0.86.2"
install litellm-1 "litellm==1.106.2 mcp==2.3.0"
install guidellm-0.8.1 "torch==2.13.0" "torch==2.13.0 guidellm==0.8.1"
install aiperf-0.13 "aiperf==0.13.*"
javascript js-1 openai@6.30.1 ai@6.0.322 @ai-sdk/openai-compatible@2.0.87
[[ $WHAT == frameworks ]] || install vllm-bench-0.33.0 \
    "torch==2.13.0 numpy" \
    "--no-deps vllm==0.33.0 llguidance==1.7.6 outlines_core==0.2.14 xgrammar==0.2.8 compressed-tensors==0.17.0 depyf==0.20.0 lm-format-enforcer==0.11.3" \
    "torch==2.13.0 transformers==5.20.* aiohttp cachetools sentencepiece blake3 py-cpuinfo pillow openai fastapi orjson prometheus_client
     prometheus-fastapi-instrumentator tiktoken partial-json-parser pyzmq mistral_common opencv-python-headless einops cloudpickle watchfiles
     python-json-logger pybase64 cbor2 ijson setproctitle oss-harmony anthropic model-hosting-container-standards mcp msgspec lark==1.2.2
     opentelemetry-api opentelemetry-sdk datasets pandas jsonschema diskcache uvloop apache-tvm-ffi==0.1.11 regex psutil"
echo "$PEERS"
