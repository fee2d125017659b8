#!/usr/bin/env bash
# Makes localhost/debian:12-slim (73 MB) from Debian's packages, for machines that reach no registry of images. Needs: mmdebstrap, podman, root.
set -euo pipefail
tar=$(mktemp --suffix .tar)
trap 'rm -f "$tar"' EXIT
# Without usrmerge, which pulls in all of perl.
# shellcheck disable=SC2016  # $1 is mmdebstrap's
mmdebstrap --variant=apt --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --customize-hook='chroot "$1" apt-get -y install usr-is-merged usrmerge- && chroot "$1" apt-get -y autoremove --purge' \
  --customize-hook='find "$1"/usr/share/locale "$1"/usr/share/man -mindepth 1 -delete; find "$1"/usr/share/doc -type f ! -name copyright -delete' \
  bookworm "$tar" "$@"
podman import --change 'CMD ["bash"]' "$tar" localhost/debian:12-slim
