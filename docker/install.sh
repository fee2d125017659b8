#!/bin/sh
# Inside a build: installs what these extras need into /opt/crossover.  docker/install.sh llama-cpp onnx
# llama.cpp is compiled first, into a folder of the cache that is named after all that it was compiled with: pip's own cache of wheels knows
# nothing of CMAKE_ARGS, and would give the wheel of one image to another.
set -eu
pip=/opt/pip/bin/pip
python3 docker/requirements.py "$@" > /tmp/requirements.txt
wheels=
pin=$(grep '^llama-cpp-python==' /tmp/requirements.txt || true)
if [ -n "$pin" ]; then
  key=$(printf '%s\n' "$pin" "$CMAKE_ARGS" "$CPU_VARIANTS" "$(uname -m)" "$(c++ --version)" "$(cat docker/amx.h)" | sha256sum | cut -c 1-16)
  wheels=/root/.cache/pip/llama-cpp/$key
  if ! ls "$wheels"/*.whl > /dev/null 2>&1; then
    made=$(mktemp -d)
    "$pip" download --no-deps --no-binary llama-cpp-python --dest "$made" "$pin"
    tar -xzf "$made"/llama_cpp_python-*.tar.gz -C "$made" --strip-components 1
    if [ -n "$CPU_VARIANTS" ]; then
      docker/keep-variants.sh "$made/vendor/llama.cpp/ggml/src/CMakeLists.txt" "$(uname -m)" "$CPU_VARIANTS"
    fi
    CXXFLAGS="-include $PWD/docker/amx.h" CMAKE_ARGS="-DLLAVA_BUILD=OFF $CMAKE_ARGS" "$pip" wheel --no-deps --wheel-dir "$made/wheel" "$made"
    mkdir -p "$wheels"
    cp "$made"/wheel/*.whl "$wheels"/
    rm -rf "$made"
  fi
fi
"$pip" --python /opt/crossover/bin/python install --progress-bar off ${wheels:+--find-links "$wheels"} -c constraints.txt -r /tmp/requirements.txt
