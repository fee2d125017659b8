#!/usr/bin/env bash
# An environment of its own for llama-cpp-python's own HTTP server, whose web framework the project does not use. The library itself is
# the project's: a .pth file shows this environment what PYTHON has installed, so that both servers run the very same compiled llama.cpp.
#
#   tests/bench/llama_server/llama_cpp_python.sh          # prints the path of its python
#   PYTHON=.venv/bin/python PIP_FLAGS=... tests/bench/llama_server/llama_cpp_python.sh
#
# It lies in $CROSSOVER_CACHE, $XDG_CACHE_HOME/crossover or ~/.cache/crossover, under peers/. A second call installs nothing.
set -euo pipefail

VERSION=0.3.36
PYTHON=${PYTHON:-python3}
CACHE=${CROSSOVER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crossover}
PEERS=$CACHE/peers
VENV=$PEERS/llama-cpp-python-server-$VERSION
LOG=$VENV.log

mkdir -p "$PEERS"
exec 9>"$PEERS/.llama-cpp-python-server.lock"
flock 9

SHOWN=$("$PYTHON" -c 'import importlib.metadata as m, llama_cpp, pathlib; print(pathlib.Path(llama_cpp.__file__).parents[1], m.version("llama-cpp-python"))')
[[ ${SHOWN##* } == "$VERSION" ]] || {
    echo "$PYTHON has llama-cpp-python ${SHOWN##* }, and this comparison is with $VERSION" >&2
    exit 1
}
if [[ ! -e $VENV/.complete ]]; then
    rm -rf "$VENV"
    {
        "$PYTHON" -m venv "$VENV"
        # shellcheck disable=SC2086
        "$VENV/bin/python" -m pip install ${PIP_FLAGS:-} "fastapi>=0.100" "uvicorn>=0.22" "pydantic-settings>=2.0.1" \
            "sse-starlette>=1.6.1" "starlette-context>=0.3.6,<0.4" PyYAML
    } >"$LOG" 2>&1 || {
        echo "the installation failed; the end of $LOG:" >&2
        tail -n 20 "$LOG" >&2
        exit 1
    }
    touch "$VENV/.complete"
fi
echo "${SHOWN% *}" >"$(echo "$VENV"/lib/python3.*/site-packages)/project.pth" # comes after the environment's own packages
"$VENV/bin/python" -c 'import llama_cpp.server.app' >&2 || exit 1
echo "$VENV/bin/python"
