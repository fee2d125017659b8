#!/usr/bin/env bash
# Says what this machine lacks to build llama.cpp with Vulkan. Where only the headers are too old (Debian 12), unpacks those of Debian 13's
# packages, without installing them:
#   docker/vulkan-headers.sh FOLDER   and then   CMAKE_PREFIX_PATH=FOLDER/usr make demo GPU=vulkan
# Exit status 3: something is missing, and it said what.
set -euo pipefail
folder=$(realpath -m "$1")
packages="glslc libvulkan-dev spirv-headers"
has() { echo "#include <vulkan/vulkan_core.h>
$1" | c++ -xc++ -fsyntax-only - 2>/dev/null; }

if ! command -v glslc >/dev/null; then
  echo "vulkan: this machine has no glslc (Debian, Ubuntu: apt-get install $packages mesa-vulkan-drivers)"
  exit 3
fi
[[ -z "${VULKAN_SDK:-}${CMAKE_PREFIX_PATH:-}" ]] || exit 0  # whoever says where they are knows which
if ! has ""; then
  echo "vulkan: this machine has no headers of Vulkan (Debian, Ubuntu: apt-get install $packages)"
  exit 3
fi
if has "VkLayerSettingEXT used;"; then exit 0; fi  # 1.3.272 or newer
[[ ! -e $folder/usr/include/vulkan/vulkan_core.h ]] || exit 0
# shellcheck disable=SC2016  # the variable is apt-get's
mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m 1 'debian/*$' || true)
if [[ -z $mirror ]]; then  # not Debian
  echo "vulkan: the headers of Vulkan here are older than 1.3.272; set VULKAN_SDK to newer ones"
  exit 3
fi
echo "vulkan: the headers of Vulkan here are older than 1.3.272; taking those of Debian 13"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" > "$work/sources.list"
cd "$work"
settings=(-qq -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache"
  -o APT::Sandbox::User="$(id -un)")
apt-get "${settings[@]}" update
apt-get "${settings[@]}" download libvulkan-dev spirv-headers
for package in ./*.deb; do dpkg-deb -x "$package" unpacked; done
rm -r unpacked/usr/lib  # the library is the system's
mkdir -p "$folder"
cp -r unpacked/usr "$folder/"
