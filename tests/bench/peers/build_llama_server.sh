#!/usr/bin/env bash
# Builds llama.cpp's own llama-server and llama-batched-bench from the source that the llama-cpp-python wheel is made of, so that
# the peer runs the very same kernels as the llama_cpp backend: same commit, same compiler, same native flags.
#
#   tests/bench/peers/build_llama_server.sh            # prints the folder with the two programs
#   JOBS=4 tests/bench/peers/build_llama_server.sh
#
# Everything lies in $CROSSOVER_CACHE or ~/.cache/crossover, under peers/. A second call builds nothing.
set -euo pipefail

VERSION=0.3.36
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-1}
CACHE=${CROSSOVER_CACHE:-$HOME/.cache/crossover}
PEERS=$CACHE/peers
SOURCE=$PEERS/llama_cpp_python-$VERSION
BUILD=$PEERS/llama-server-$VERSION
LOG=$PEERS/llama-server-$VERSION.log
AMX=$(realpath "$(dirname "$0")/../../../docker/amx.h")

mkdir -p "$PEERS"
exec 9>"$PEERS/.llama-server.lock"
flock 9

if [[ -x $BUILD/bin/llama-server && -x $BUILD/bin/llama-batched-bench && -e $BUILD/.complete ]]; then
    echo "$BUILD/bin"
    exit 0
fi

if [[ ! -e $SOURCE/vendor/llama.cpp/CMakeLists.txt ]]; then
    [[ -e $SOURCE.tar.gz ]] ||
        "$PYTHON" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$PEERS" "llama-cpp-python==$VERSION" >&2
    rm -rf "$SOURCE.part" && mkdir "$SOURCE.part"
    tar -xzf "$SOURCE.tar.gz" -C "$SOURCE.part" --strip-components 1
    rm -rf "$SOURCE" && mv "$SOURCE.part" "$SOURCE"
fi

# GGML_NATIVE, Release and amx.h are the wheel's own settings. No web page, no TLS, no download of either: the server is measured, not browsed.
GENERATOR=()
command -v ninja >/dev/null && GENERATOR=(-G Ninja)
{
    CXXFLAGS="-include \"$AMX\" ${CXXFLAGS:-}" nice -n 19 cmake -S "$SOURCE/vendor/llama.cpp" -B "$BUILD" "${GENERATOR[@]}" \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
    nice -n 19 cmake --build "$BUILD" --target llama-server llama-batched-bench -j "$JOBS"
} >"$LOG" 2>&1 || {
    echo "the build failed; the end of $LOG:" >&2
    tail -n 20 "$LOG" >&2
    exit 1
}
touch "$BUILD/.complete"
echo "$BUILD/bin"
