#!/usr/bin/env bash
# Question: torch says of a compiled model that backward with retain_graph=True needs
# torch._functorch.config.donated_buffer = False. With that, are two backwards of one graph the same, whatever ran
# before?
# A good guess: yes. The option is a part of what compiled code is cached by.
# What happens: only where the cache is empty. If an earlier process has compiled the model in the usual way, its
# code, which writes over saved activations, is taken from the cache on disk, and most gradients of the second
# backward are wrong, without an error. With an empty TORCHINDUCTOR_CACHE_DIR, or
# TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, they are right.
# Version: torch 2.13.0.
# Source: torch/_functorch/config.py, donated_buffer; torch/_inductor/codecache.py, FxGraphHashDetails, which does not
# have it.
# Who meets it: whoever differentiates twice through a compiled model, as for the norm first and the step then.
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
from torch._functorch import config


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


torch.manual_seed(0)
model = nn.Sequential(Gated(32), Gated(32))
x = torch.randn(16, 32)
if sys.argv[1] == "usual":
    torch.compile(model)(x).square().mean().backward()
    raise SystemExit
config.donated_buffer = False
loss = torch.compile(model)(x).square().mean()
first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
second = torch.autograd.grad(loss, list(model.parameters()))
print(sum(not torch.equal(one, other) for one, other in zip(first, second)))
END
cached() { TORCHINDUCTOR_CACHE_DIR="$folder/$1" environment/bin/python -W ignore program.py "$2"; }
empty=$(cached one twice)
cached two usual
filled=$(cached two twice)
disabled=$(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 cached two twice)
environment/bin/python -c 'import torch; print("torch", torch.__version__)'
echo "gradients that differ between two backwards: $empty with an empty cache, $filled after a run in the usual way, $disabled without the cache"
if [ "$empty" != 0 ] || [ "$filled" = 0 ] || [ "$disabled" != 0 ]; then
    echo "this torch does otherwise" >&2
    exit 1
fi
echo "as described: the code of the earlier run is used again"
