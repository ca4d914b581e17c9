#!/usr/bin/env bash
# Everything that needs a GPU, in about ten minutes: the benchmarks, then the tests on CUDA.
# Usage: benchmarks/all_on_cuda.sh FOLDER [DATA]    (PYTHON chooses the interpreter; DATA has CIFAR-10)
set -u
out=${1:?a folder for the records}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
data=${2:+--data-root=$(cd "$2" && pwd)}
cd "$(dirname "$0")/.."
# Absolute: some tests start processes in other folders.
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
timeout 60 "$python" benchmarks/compile_kernels.py
timeout 90 "$python" benchmarks/step_overhead.py --out "$out/step_overhead-cuda.json"
timeout 40 "$python" benchmarks/noise_bandwidth.py --out "$out/noise_bandwidth-cuda.json"
timeout 40 "$python" benchmarks/scaling.py --out "$out/scaling-cuda.json"
timeout 30 "$python" benchmarks/memory.py --out "$out/memory-cuda.json"
timeout 100 "$python" benchmarks/ghost_conv.py --out "$out/ghost_conv-cuda.json"
timeout 180 "$python" benchmarks/epoch_time.py ${data:-} --lanes 8 --out "$out/epoch_time-cuda.json"
timeout 120 "$python" benchmarks/methods_in_turns.py ${data:-} --out "$out/methods_in_turns-cuda.json"
timeout 60 "$python" benchmarks/side_by_side.py ${data:-} --epochs 10 --methods smoothout --out "$out/side_by_side-cuda.json"
timeout 480 "$python" -m pytest -v -m gpu tests 2>&1 | tee "$out/tests-cuda.log" | tail -40
