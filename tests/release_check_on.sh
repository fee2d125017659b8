#!/usr/bin/env bash
# Runs the release check on another release of Debian, with its Python, compiler and glibc. Needs:
# mmdebstrap, root.
#   tests/release_check_on.sh trixie
# It checks the last commit. The root is made of Debian's packages and removed at the end. Further
# arguments go to mmdebstrap.
set -euo pipefail
suite=$1
shift
source=$(cd "$(dirname "$0")/.." && pwd)
export source
# shellcheck disable=SC2016  # mmdebstrap runs these, and $1 is the root
mmdebstrap --variant=apt --format=null --include=ca-certificates,g++,python3-venv \
  --customize-hook='cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$1/etc/ssl/certs/"' \
  --customize-hook='mkdir "$1/src" && git -C "$source" archive HEAD | tar -x -C "$1/src"' \
  --customize-hook='chroot "$1" env HOME=/root TMPDIR=/tmp sh -euc "cd /src
    grep PRETTY_NAME /etc/os-release; python3 --version; c++ --version | head -n 1; getconf GNU_LIBC_VERSION
    exec python3 -m tests.release_check"' \
  "$@" "$suite" -
