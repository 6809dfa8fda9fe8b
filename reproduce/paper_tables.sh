#!/usr/bin/env bash
# The paper's training-free tables (arXiv 2604.00754): Qwen3-8B and Qwen3-30B-A3B as they are, under eight methods at six
# budgets, three routing seeds where there is chance. Needs one GPU of 80 GB and the hub, for models and rows; pip install
# "stochastic-attention[harness]". Finished cells are kept: start the script again after any stop.
#
#   bash reproduce/paper_tables.sh [--dry-run] [--match w_eff|w_scored] [--device DEVICE] [--output FOLDER] [--data DIR]
#       [--allow-code]
#
# --dry-run prints the commands, and what they need by arithmetic, and runs nothing. --match w_eff, the default, is the
# paper's budget; at w_scored methods are compared at equal keys of the scored queries, which flatters none (README).
# Tables show both means whichever is matched. --data is a folder with the rows of tasks in files (docs/evaluation.md).
#
# HumanEval, the paper's seventh task, runs programs that the model writes, and so only with --allow-code, which belongs
# into a container; without it averages are over six tasks, and not to be set beside the paper's averages over seven.
set -euo pipefail
cd "$(dirname "$0")/.."

models=(Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B)
methods=swa,swa+sinks,moba-k2,moba,strided,bigbird,sa,union # moba-k2: two coarse blocks; moba: fine blocks
budgets=16,32,64,128,256,512
seeds=3
tasks=mmlu,boolq,hellaswag,lambada_openai,arc_easy,arc_challenge

dry_run=false match=w_eff device=cuda output=results/paper options=()
while (($#)); do
	case $1 in
	--dry-run) dry_run=true ;;
	--allow-code)
		tasks+=,humaneval
		options+=(--allow-code)
		;;
	--match | --device | --output | --data)
		(($# > 1)) || { echo "$1 must have a value" >&2 && exit 2; }
		if [[ $1 == --data ]]; then options+=(--data "$2"); else declare "${1#--}=$2"; fi
		shift
		;;
	*) echo "options are --dry-run, --match, --device, --output, --data and --allow-code, got $1" >&2 && exit 2 ;;
	esac
	shift
done
[[ $match == w_eff || $match == w_scored ]] || { echo "--match must be w_eff or w_scored, got $match" >&2 && exit 2; }

run() {
	printf '%q ' "$@"
	echo
	$dry_run || "$@"
}

# What a model needs, from its card and from assumptions; nothing here is measured.
#   needs NAME PARAMETERS ACTIVE_PARAMETERS LAYERS KV_HEADS   (parameters in millions; head dimension 128, 2 bytes a number)
# Rows x assumed tokens that are run, upwards of the lists of the harness; answers of one token share a row:
#   MMLU 14,042 x 130 + BoolQ 3,270 x 160 + HellaSwag 10,042 x 4 x 95 + LAMBADA 5,153 x 90 + ARC-Easy 2,376 x 4 x 45
#   + ARC-Challenge 1,172 x 4 x 50; HumanEval comes on top: 164 x up to 1,024 tokens, one at a time.
# Every pass is counted whole, though a text that is within the window of a method is not run again.
# A token costs 2 operations a parameter that it meets; attention adds little at such lengths. Assumed speed: 10^14
# operations a second, a third of the 3.12 x 10^14 that an A100's data sheet gives for bfloat16.
# Logits of the scored tokens alone: 32 rows of at most 64 tokens, 151,936 words, 2 bytes and once more in 4.
needs() {
	local tokens=$((14042 * 130 + 3270 * 160 + 10042 * 4 * 95 + 5153 * 90 + 2376 * 4 * 45 + 1172 * 4 * 50))
	local passes=$((1 + 6 * (5 + 3 * seeds))) # full; at each budget five methods without chance, three with
	local seconds=$((2 * $3 * tokens / 100000000))
	echo "$1, by arithmetic: weights $((2 * $2 / 1000)) GB, keys and values $((2 * $4 * $5 * 128 * 2 / 1000)) kB a token," \
		"logits of a batch at most $((32 * 64 * 151936 * 6 / 1000000)) MB; $passes passes over" \
		"$((tokens / 1000000)) million tokens, $((seconds / 60)) minutes each, $((passes * seconds / 3600)) hours" >&2
}
needs Qwen/Qwen3-8B 8190 8190 36 8
needs Qwen/Qwen3-30B-A3B 30530 3350 48 4

for model in "${models[@]}"; do
	run sattn eval "$model" --tasks "$tasks" --methods "$methods" --budgets "$budgets" --match "$match" --seeds "$seeds" \
		--device "$device" --dtype bfloat16 --batch-size 32 --output "$output/${model#*/}" "${options[@]}"
done
run sattn report "$output" --output "$output/report.html"
