#!/usr/bin/env bash
# For a person with one GPU: correctness against the oracle first, then speed and peak memory. Needs torch alone.
#   bash benchmarks/gpu.sh [OUTPUT_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
out="${1:-results/gpu}"
mkdir -p "$out"
python3 -m stochastic_attention backends | tee "$out/backends.txt"
python3 -m stochastic_attention bench --device cuda --dtype float32 --lengths 2048,8192 --repeats 3 --memory \
	--output "$out/bench-float32.json" | tee "$out/bench-float32.txt"
python3 -m stochastic_attention bench --device cuda --dtype bfloat16 --heads 16 --lengths 2048,8192,32768 --repeats 3 \
	--passes forward,backward --output "$out/bench-bfloat16.json" | tee "$out/bench-bfloat16.txt"
