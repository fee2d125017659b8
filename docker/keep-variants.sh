#!/bin/sh
# Removes the CPU variants that are not named from GGML's list.  docker/keep-variants.sh CMAKELISTS ARCHITECTURE "NAME NAME"
# Names that begin with armv are for aarch64, all others for x86_64. A name that GGML does not know is an error.
set -eu
list=$1
names=
for name in $3; do
  case $2,$name in
    aarch64,armv* | arm64,armv*) ;;
    x86_64,armv*) continue ;;
    x86_64,*) ;;
    *) continue ;;
  esac
  grep -qF -e "ggml_add_cpu_backend_variant($name " -e "ggml_add_cpu_backend_variant($name)" "$list" || { echo "CPU_VARIANTS: GGML knows no $name" >&2; exit 1; }
  names="$names${names:+|}$(echo "$name" | sed 's/[.]/[.]/g')"
done
[ -n "$names" ] || { echo "CPU_VARIANTS names no variant for $2" >&2; exit 1; }
sed -i -E "/ggml_add_cpu_backend_variant\(/{/\(($names)[ )]/!d}" "$list"
