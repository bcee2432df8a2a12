#!/usr/bin/env bash
# All tables of docs/performance.md, one after the other: about an hour on two cores that do nothing else.
#
#     bash benchmarks/performance.sh
#
# The last but one needs root and iproute2, for a link between two network namespaces.
set -euo pipefail
cd "$(dirname "$0")/.."
run() {
    printf '\n## %s\n' "$*"
    "$@"
}

run python benchmarks/looking.py
run python benchmarks/looking.py --accelerator
run python benchmarks/looking.py --where --rounds 60
run python benchmarks/foreign.py --rounds 20
run python benchmarks/masters.py
run python benchmarks/masters.py --micro 4 --kinds fused --rounds 20
run python benchmarks/compiled.py
run python benchmarks/compiled.py --blocks 6 --clip
run python benchmarks/default_bucket.py --mib 1 4 16 64
run python benchmarks/micro_batches.py --mib 1 4 16 --rounds 25
run python benchmarks/one_device.py --rounds 25 --depth 6 --dtypes float32 --times-only \
    --variants "plain, again" default backward forward "no optimizer"
run python benchmarks/heavy_steps.py --float32 --rounds 4
run python benchmarks/two_ranks.py --gbits 2 10 --variants "plain DDP" backward "no optimizer"
run torchrun --standalone --nproc-per-node 2 benchmarks/zero.py --muon --rounds 10
