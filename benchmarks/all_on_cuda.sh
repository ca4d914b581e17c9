#!/usr/bin/env bash
# Everything that needs a GPU, in about three minutes: the property suite on CUDA, then the benchmarks.
# Usage: benchmarks/all_on_cuda.sh FOLDER    (PYTHON chooses the interpreter)
set -u
out=${1:?a folder for the records}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
# Absolute: some tests start processes in other folders.
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
timeout 60 "$python" benchmarks/compile_kernels.py
timeout 150 "$python" -m pytest -v tests/test_kernels.py tests/test_fused.py 2>&1 | tee "$out/property-suite-cuda.log" | tail -40
timeout 40 "$python" benchmarks/noise_bandwidth.py --out "$out/noise_bandwidth-cuda.json"
timeout 120 "$python" benchmarks/step_overhead.py --out "$out/step_overhead-cuda.json"
timeout 60 "$python" benchmarks/scaling.py --out "$out/scaling-cuda.json"
timeout 30 "$python" benchmarks/memory.py --out "$out/memory-cuda.json"
