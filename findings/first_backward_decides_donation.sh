#!/usr/bin/env bash
# Question: a compiled model's backward is run with retain_graph=True. Does that raise, or not?
# A good guess: one or the other, for a given model and switch: what is compiled either may write over saved activations
# or may not.
# What happens: it depends on how the first backward of that code was run. torch compiles it there, and leaves donated
# buffers out if that backward keeps its graph: then all later ones may, too. If the first one keeps nothing, each later
# one that does raises RuntimeError.
# Version: torch 2.13.0.
# Source: torch/_functorch/_aot_autograd/runtime_wrappers.py, where the backward is compiled lazily (bw_donated_idxs).
# Who meets it: whoever takes two backwards of one graph now and then (a norm first, a gradient penalty, a logged loss):
# the loop runs or raises by what came first.
# Needs a C++ compiler, and takes some minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
cat >program.py <<'END'
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
answers = []
for keeps in sys.argv[1:]:
    loss = model(torch.randn(4, 8)).square().mean()
    try:
        loss.backward(retain_graph=keeps == "keeps")
        answers.append("runs")
    except RuntimeError as error:
        assert "donated" in str(error), error
        answers.append("raises")
print(*answers)
END
run() { TORCHINDUCTOR_CACHE_DIR="$folder/$1" environment/bin/python -W ignore program.py "${@:2}"; }
first=$(run one keeps drops keeps)
later=$(run two drops keeps)
environment/bin/python -c 'import torch; print("torch", torch.__version__)'
echo "keeps, drops, keeps: $first; drops, keeps: $later"
if [ "$first" != "runs runs runs" ] || [ "$later" != "runs raises" ]; then
    echo "this torch does otherwise" >&2
    exit 1
fi
echo "as described: the first backward decides"
