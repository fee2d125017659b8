#!/usr/bin/env bash
# Installs the two load generators that ours is compared with, each into an environment of its own: their dependencies are not ours.
#
#   tests/bench/driver_peers/install.sh            # prints the folder that holds guidellm-0.8.1/ and aiperf-0.13/
#
# Everything lies in $CROSSOVER_CACHE, $XDG_CACHE_HOME/crossover or ~/.cache/crossover, under peers/. A second call installs nothing. torch
# is named first, in the version whose wheel for the CPU is small: GuideLLM asks for any torch, and the newest brings gigabytes of CUDA.
set -euo pipefail

PYTHON=${PYTHON:-python3}
CACHE=${CROSSOVER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crossover}
PEERS=$CACHE/peers
mkdir -p "$PEERS"
exec 9>"$PEERS/.driver-peers.lock"
flock 9

install() {  # name, then what pip installs in which order: one call each, so that what comes first is kept
    local place=$PEERS/$1
    shift
    [[ -e $place/.complete ]] && return 0
    rm -rf "$place"
    "$PYTHON" -m venv "$place"
    for what in "$@"; do
        nice -n 19 "$place/bin/pip" install --quiet --no-compile $what >>"$place/install.log" 2>&1 || {
            echo "pip install $what failed; the end of $place/install.log:" >&2
            tail -n 20 "$place/install.log" >&2
            exit 1
        }
    done
    touch "$place/.complete"
}

install guidellm-0.8.1 "torch==2.13.0" "torch==2.13.0 guidellm==0.8.1"
install aiperf-0.13 "aiperf==0.13.*"
echo "$PEERS"
