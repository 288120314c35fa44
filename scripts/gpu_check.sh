#!/usr/bin/env bash
# All that needs a GPU, in one run of under 8 minutes: kernels against their references on fresh
# random inputs, achieved over measured copy bandwidth, speculation equal to plain decoding,
# device-to-host copies of a cycle, training. A table at the end; results in the folder that OUT
# names, else out/. Nothing is installed: jax 0.11.2 or later, flax, jaxtyping and numpy are wanted.
#
#   scripts/gpu_check.sh            on a GPU of compute capability 9.0
#   scripts/gpu_check.sh --dry      on CPU, kernels interpreted, tiny shapes, no speed
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-out}"
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Interpreted warpgroups wait for each other, each on a thread of XLA's.
export NPROC="${NPROC:-32}"
exec "${PYTHON:-python3}" scripts/gpu_check.py --out "$OUT" "$@"
