#!/usr/bin/env bash
# The paper's training-free tables (arXiv 2604.00754): Qwen3-8B and Qwen3-30B-A3B as they are, under seven methods at six
# budgets, three routing seeds where there is chance. Needs one GPU of 80 GB and the hub, for models and rows; pip install
# "stochastic-attention[harness]". Every run resumes: start the script again after any stop.
#
#   bash reproduce/paper_tables.sh [--dry-run] [--match w_eff|w_scored] [--device DEVICE] [--output FOLDER]
#
# --dry-run prints the commands, and what they need by arithmetic, and runs nothing. --match w_eff, the default, is the
# paper's budget; at w_scored methods are compared at equal keys of the scored queries, which flatters none (README).
# Tables show both means whichever is matched.
#
# HumanEval, the paper's seventh task, is left out: `sattn eval` scores likelihoods, and runs no generated programs.
# Averages are therefore over six tasks, and not to be set beside the paper's averages over seven.
set -euo pipefail
cd "$(dirname "$0")/.."

models=(Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B)
methods=(swa swa+sinks moba-k2 moba sa sa-prefix union) # moba-k2: two coarse blocks; moba: fine blocks
budgets=(16 32 64 128 256 512)
seeds=3
mmlu=(mmlu_{abstract_algebra,anatomy,astronomy,business_ethics,clinical_knowledge,college_biology,college_chemistry}
	mmlu_{college_computer_science,college_mathematics,college_medicine,college_physics,computer_security}
	mmlu_{conceptual_physics,econometrics,electrical_engineering,elementary_mathematics,formal_logic,global_facts}
	mmlu_high_school_{biology,chemistry,computer_science,european_history,geography,government_and_politics}
	mmlu_high_school_{macroeconomics,mathematics,microeconomics,physics,psychology,statistics,us_history,world_history}
	mmlu_{human_aging,human_sexuality,international_law,jurisprudence,logical_fallacies,machine_learning,management}
	mmlu_{marketing,medical_genetics,miscellaneous,moral_disputes,moral_scenarios,nutrition,philosophy,prehistory}
	mmlu_professional_{accounting,law,medicine,psychology} mmlu_{public_relations,security_studies,sociology}
	mmlu_{us_foreign_policy,virology,world_religions})
tasks=("${mmlu[@]}" boolq hellaswag lambada_openai arc_easy arc_challenge)

dry_run=false match=w_eff device=cuda output=results/paper
while (($#)); do
	case $1 in
	--dry-run) dry_run=true ;;
	--match | --device | --output)
		(($# > 1)) || { echo "$1 must have a value" >&2 && exit 2; }
		declare "${1#--}=$2"
		shift
		;;
	*) echo "options are --dry-run, --match, --device and --output, got $1" >&2 && exit 2 ;;
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
# Rows x answers x assumed tokens of question and answer, upwards of the lists of the harness:
#   MMLU 14,042 x 4 x 130 + BoolQ 3,270 x 2 x 160 + HellaSwag 10,042 x 4 x 95 + LAMBADA 5,153 x 90
#   + ARC-Easy 2,376 x 4 x 45 + ARC-Challenge 1,172 x 4 x 50
# A token costs 2 operations a parameter that it meets; attention adds little at such lengths. Assumed speed: 10^14
# operations a second, a third of the 3.12 x 10^14 that an A100's data sheet gives for bfloat16.
# Logits: 8 rows of at most 1,024 tokens, 151,936 words, 2 bytes and once more in 4.
needs() {
	local tokens=$((14042 * 4 * 130 + 3270 * 2 * 160 + 10042 * 4 * 95 + 5153 * 90 + 2376 * 4 * 45 + 1172 * 4 * 50))
	local passes=$((1 + ${#budgets[@]} * (4 + 3 * seeds))) # full; four methods without chance, three with
	local seconds=$((2 * $3 * tokens / 100000000))
	echo "$1, by arithmetic: weights $((2 * $2 / 1000)) GB, keys and values $((2 * $4 * $5 * 128 * 2 / 1000)) kB a token," \
		"logits of a batch at most $((8 * 1024 * 151936 * 6 / 1000000000)) GB; $passes passes over" \
		"$((tokens / 1000000)) million tokens, $((seconds / 60)) minutes each, $((passes * seconds / 3600)) hours" >&2
}
needs Qwen/Qwen3-8B 8190 8190 36 8
needs Qwen/Qwen3-30B-A3B 30530 3350 48 4

for model in "${models[@]}"; do
	folder=$output/${model#*/}
	shared=(sattn eval "$model" --tasks "$(IFS=, && echo "${tasks[*]}")" --device "$device" --dtype bfloat16 --batch-size 8)
	run "${shared[@]}" --method full --output "$folder/full"
	for budget in "${budgets[@]}"; do
		for method in "${methods[@]}"; do
			run "${shared[@]}" --method "$method" --budget "$budget" --match "$match" --seeds "$seeds" \
				--output "$folder/$method-$budget"
		done
	done
	run python3 reproduce/paper_table.py "$folder"
done
run sattn report "$output" --output "$output/report.html"
