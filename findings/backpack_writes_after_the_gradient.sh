#!/usr/bin/env bash
# Question: BackPACK puts the gradients of single samples on each parameter while backward runs. Are they there when the
# parameter's own gradient is: in a hook of register_post_accumulate_grad_hook?
# A good guess: yes. After backward both are there.
# What happens: only for some parameters. Of others grad_batch is absent in the first backward, and in every later one
# it is the last batch's, for the hook of a module runs after the gradients of that module's parameters. Nothing
# raises. After backward all are right.
# Version: backpack-for-pytorch 1.7.1, torch 2.13.0.
# Source: backpack/__init__.py, _register_hooks: a full backward hook of each module.
# Who meets it: whoever steps, clips or logs in hooks of parameters by per-sample gradients.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
install torch==2.13.0 torchvision==0.28.0 backpack-for-pytorch==1.7.1
cat >program.py <<'END'
import torch
from backpack import backpack, extend
from backpack.extensions import BatchGrad
from torch import nn

torch.manual_seed(0)
layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
model, loss_function = extend(nn.Sequential(*layers)), extend(nn.MSELoss())
names = {p: name for name, p in model.named_parameters()}
found, seen = {}, []


def look(p):
    found[p] = getattr(p, "grad_batch", None)


for p in model.parameters():
    p.register_post_accumulate_grad_hook(look)
for i in range(2):
    model.zero_grad()
    loss = loss_function(model(torch.full((3, 4), 1.0 + i)), torch.zeros(3, 2))
    with backpack(BatchGrad()):
        loss.backward()
    whole = {p: p.grad_batch.clone() for p in model.parameters()}
    seen.append(sorted(names[p] for p, then in found.items() if then is None or not torch.equal(then, whole[p])))
    absent = sorted(names[p] for p, then in found.items() if then is None)
    print(f"backward {i + 1}: not of this batch in hooks: {seen[-1]}, absent: {absent}")
raise SystemExit(not (seen[0] and seen[0] == seen[1]))
END
environment/bin/python -c 'import backpack, torch; from importlib.metadata import version; print("backpack", version("backpack-for-pytorch"), "torch", torch.__version__)'
environment/bin/python -W ignore program.py || {
    echo "this BackPACK does otherwise" >&2
    exit 1
}
echo "as described: hooks of some parameters find the last batch's"
