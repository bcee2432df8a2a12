#!/usr/bin/env bash
# Question: weights in bfloat16 are trained by AdamW with its default betas (0.9, 0.999) and weight decay. Steps with
# gradients of 1 are followed by thousands with gradients of 0. Does the second moment forget the gradients of 1 (by
# half in 693 steps), and does weight decay shrink the weights? And with the ways around bfloat16's rounding: torchao's
# stochastic rounding, optimi's Kahan sums?
# A good guess: both, with some noise of rounding; and well with either way around it.
# What happens: in torch neither changes by a bit, for-loop, foreach and fused. exp_avg_sq * 0.999 and
# p * (1 - lr * weight_decay) are nearer to what they were than half of a step of bfloat16, and are rounded back. Large
# gradients make later updates small for ever. The ways around it round weights otherwise, not the second moment:
# torchao's forgets nothing, optimi's nothing from some 700 steps on (before, its bias correction makes beta2 smaller).
# And with Kahan sums no weight decays: it is multiplied outside of the sum. With beta2 = 0.99 the second moment forgets
# everywhere.
# Version: torch 2.13.0, torchao 0.18.0, torch-optimi 0.3.3, on a CPU (optimi has other kernels on a GPU).
# Source: tried. pytorch/ao's pull request 1124 brought bf16_stochastic_round, for the weights. optimi's page of Kahan
# sums, after Zamirai et al. (arXiv 2010.06192), calls the update of weights the primary source of error, and does not
# say that the second moment, or weight decay, is left out.
# Who meets it: whoever trains a model whose weights were loaded in bfloat16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
install torchao==0.18.0 torch-optimi==0.3.3 packaging==26.4
cat >program.py <<'END'
from functools import partial
from importlib.metadata import version

import optimi
import torch
from torchao.optim import _AdamW

STEPS = 3000


def left(make, dtype, beta2):
    """Of the second moment, and of a weight, after steps without a gradient."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.full((1000,), 2.0, dtype=dtype))
    optimizer = make([weights], lr=1e-2, betas=(0.9, beta2), weight_decay=0.01)
    for step in range(STEPS + 1000):
        weights.grad = torch.full_like(weights, float(step < 100))
        optimizer.step()
        if step == 999:  # momentum moves nothing from here on
            before = optimizer.state[weights]["exp_avg_sq"].clone(), weights.detach().clone()
    after = optimizer.state[weights]["exp_avg_sq"], weights.detach()
    return tuple(round(float(new.float().mean() / old.float().mean()), 2) for new, old in zip(after, before))


AdamW = torch.optim.AdamW
ways = {
    "float32": (partial(AdamW, fused=True), torch.float32),
    "for-loop": (partial(AdamW, foreach=False), torch.bfloat16),
    "foreach": (partial(AdamW, foreach=True), torch.bfloat16),
    "fused": (partial(AdamW, fused=True), torch.bfloat16),
    "stochastic rounding": (partial(_AdamW, bf16_stochastic_round=True), torch.bfloat16),
    "Kahan sums": (partial(optimi.AdamW, kahan_sum=True), torch.bfloat16),
}
print(f"torch {torch.__version__}, torchao {version('torchao')}, torch-optimi {version('torch-optimi')}")
print(f"left of the second moment, and of a weight, after {STEPS} steps without a gradient:")
found = {name: (left(*way, 0.999), left(*way, 0.99)) for name, way in ways.items()}
for name, (usual, smaller) in found.items():
    print(f"  {name}: {usual}; with beta2 = 0.99: {smaller}")
forgets, keeps = {"float32": 0.05}, 1.0
decays = {"float32": 0.74, "stochastic rounding": 0.74}
for name, (usual, smaller) in found.items():
    expected = (forgets.get(name, keeps), decays.get(name, keeps))
    if max(abs(a - b) for a, b in zip(usual, expected)) > 0.01 or smaller[0] > 0.01:
        raise SystemExit(f"these versions do otherwise: {name}")
print("as described: in bfloat16 the second moment forgets nothing, and weights decay with stochastic rounding alone")
END
environment/bin/python -W ignore program.py
