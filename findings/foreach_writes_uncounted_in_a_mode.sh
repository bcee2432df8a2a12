#!/usr/bin/env bash
# Question: a weight is written by optimizer.step() between forward and backward, which autograd refuses ("modified by
# an inplace operation"). Does it refuse that, too, while FlopCounterMode, or another TorchDispatchMode, is on?
# A good guess: yes. A mode sees operations, and changes nothing of what they do.
# What happens: no, where the write is a foreach operation, as in torch's default SGD, Adam and AdamW of several
# parameters. In the mode torch._foreach_add_ counts no write of its tensors (their version stays), so that backward
# computes a gradient from the new weight, without an error. A write of a single tensor (foreach=False) is counted, and
# refused, in the mode as outside of it.
# Version: torch 2.13.0, on a CPU.
# Source: tried, and the same with 2.6.0 and 2.14.1. torch's notes on autograd ("In-place correctness checks") say that
# a backward raises if a saved tensor was written since; the pages of FlopCounterMode do not mention it.
# Who meets it: whoever counts operations or memory around a training step whose order of backward and step is wrong,
# and who reads versions to know whether a tensor was written.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
cat >program.py <<'END'
from contextlib import nullcontext

import torch
from torch.utils.flop_counter import FlopCounterMode


def is_refused(foreach, mode):
    """Whether backward raises after a step that came too early."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, foreach=foreach)
    with mode:
        layers(torch.ones(2, 3)).sum().backward()
        loss = layers(torch.ones(2, 3)).sum()
        optimizer.step()
        try:
            loss.backward()
        except RuntimeError as error:
            return "inplace operation" in str(error)
    return False


def counted(mode):
    tensor = torch.zeros(2)
    with mode:
        torch._foreach_add_([tensor], 1)
    return tensor._version


quiet = lambda: FlopCounterMode(display=False)
seen = {
    "refused, foreach": is_refused(True, nullcontext()),
    "refused, one by one": is_refused(False, nullcontext()),
    "refused, foreach, in FlopCounterMode": is_refused(True, quiet()),
    "refused, one by one, in FlopCounterMode": is_refused(False, quiet()),
    "writes counted": counted(nullcontext()),
    "writes counted in FlopCounterMode": counted(quiet()),
}
print(f"torch {torch.__version__}:")
for name, found in seen.items():
    print(f"  {name}: {found}")
if list(seen.values()) != [True, True, False, True, 1, 0]:
    raise SystemExit("this torch does otherwise")
print("as described: in a dispatch mode foreach operations count no write")
END
environment/bin/python -W ignore program.py
