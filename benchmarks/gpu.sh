#!/usr/bin/env bash
# For a person with one GPU: is the op right on it, and how fast is it? Needs torch and triton; no network.
#
#   bash benchmarks/gpu.sh [--budget SECONDS] [OUTPUT_FOLDER]
#
# First everything is compared with the oracle; where anything is wrong it says so in red and stops. Then speed and peak
# memory, the small shapes first, within what is left of the budget (330 s); what is left out is named. Records are
# saved as they grow. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

budget=330
out=results/gpu
failed=0
while [ $# -gt 0 ]; do
	case "$1" in
	--budget)
		budget="${2:?--budget needs a number of seconds}"
		shift 2
		;;
	-*)
		sed -n '2,9s/^# \{0,1\}//p' "$0"
		exit 2
		;;
	*)
		out="$1"
		shift
		;;
	esac
done
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"

sattn() { "${PYTHON:-python3}" -m stochastic_attention "$@"; }
# Seconds until $1 seconds before the end; not negative.
left() { echo $((budget - SECONDS > $1 ? budget - SECONDS - $1 : 0)); }

# Each worker compiles and runs some of the checks; what they compile is kept for the measurements.
workers=$(nproc)
sattn check --device cuda --workers $((workers < 8 ? workers : 8)) 2>&1 | tee "$out/check.txt"

known=results/gpu/predictions.json
shape=(--device cuda --dtype bfloat16 --heads 16 --head-dim 64,128 --window 256 --full auto,flash,cudnn,efficient,flex)

sattn bench "${shape[@]}" --passes decode --lengths 8192,32768,131072,524288 \
	--patterns swa,sliding,block,prefix-sliding,prefix-block,union,gated --repeats 15 \
	--predictions "$known" --plot "$out/decode.png" --output "$out/decode.json" --budget "$(left 60)" |
	tee "$out/decode.txt" || failed=1

sattn bench "${shape[@]}" --passes forward,backward --lengths 2048,8192,32768,131072 --tokens 131072 --memory \
	--patterns swa,sliding,block,prefix-sliding,prefix-block,union,gated,moba --repeats 5 \
	--predictions "$known" --plot "$out/speed.png" --output "$out/speed.json" --budget "$(left 60)" |
	tee "$out/speed.txt" || failed=1

# The same with a new permutation for every call, as in training, and without a host in between.
for how in "--draw always" "--replay"; do
	name="${how//[- ]/}"
	# shellcheck disable=SC2086 - an option and its value
	sattn bench "${shape[@]/auto,flash,cudnn,efficient,flex/auto,flash,cudnn}" $how --passes forward,backward \
		--lengths 2048,8192,32768 --tokens 131072 --patterns swa,sliding,block,gated --repeats 5 \
		--predictions "$known" --output "$out/$name.json" --budget "$(left 10)" | tee "$out/$name.txt" || failed=1
done
echo "took $SECONDS s"
exit $failed
