#!/usr/bin/env bash
# Builds one image with buildah: docker/build.sh TARGET TAG [FILE]     docker/build.sh cpu localhost/crossover:cpu
# Where Docker is, `docker build -f docker/Dockerfile --target cpu -t crossover:cpu .` does the same.
#   BASE=localhost/debian:12-slim   a base made by docker/base.sh, where no registry of images can be reached
#   CMAKE_ARGS, CPU_VARIANTS        how llama.cpp is compiled, where not as the Dockerfile says
# The CA of this machine reaches pip as a build secret, so it is in no layer. What was compiled before (llama.cpp) is not compiled again.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$1 tag=$2 file=${3:-docker/Dockerfile}
given=$(mktemp -d)
trap 'rm -rf "$given"' EXIT
cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$given/ca.crt"
{ echo '[global]'
  { pip config list 2>/dev/null || true; } | sed -n "s/^[a-z]*\.\(index-url\|extra-index-url\)='\(https\?:.*\)'/\1 = \2/p"
  printf 'timeout = 180\ncert = /run/ca.crt\n'; } > "$given/pip.conf"
args=(--build-arg "BASE=${BASE:-docker.io/library/debian:12-slim}")
for name in CMAKE_ARGS CPU_VARIANTS; do [[ -v $name ]] && args+=(--build-arg "$name=${!name}"); done
buildah bud --isolation "${ISOLATION:-oci}" --runtime "${RUNTIME:-runc}" --network host --format docker --layers "${args[@]}" \
  --secret "id=pip.conf,src=$given/pip.conf" --secret "id=ca.crt,src=$given/ca.crt" \
  ${target:+--target "$target"} --tag "$tag" --file "$file" .
