#!/usr/bin/env bash
# Question: module.compile() is called on an nn.Sequential, or another module of a class of torch's own, and the module
# is then called. Is it compiled? Does a hook that does nothing change that?
# A good guess: it is compiled, and such a hook changes nothing.
# What happens: nothing is compiled, and nothing is said. With a forward hook or pre-hook on the module it is compiled.
# So numbers change in their last bits, with inductor, when a hook is added or removed: by a profiler, a logger, an
# average of weights. A class of one's own, and torch.compile(module), are compiled with and without.
# Version: torch 2.13.0, on a CPU. torch 2.10.0 compiles it in neither case, torch 2.15.0 in both.
# Source: tried. The page of nn.Module.compile() says that the module's forward is compiled.
# Who meets it: who compiles a model block by block, with blocks such as nn.TransformerEncoderLayer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
cat >program.py <<'END'
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)


def graphs(module, hooks):
    """How many graphs are compiled."""
    torch.compiler.reset()
    counter = CompileCounter()
    if hooks:
        module.register_forward_pre_hook(lambda *_: None)
    module.compile(backend=counter)
    module(torch.ones(2, 8))
    return counter.frame_count


print(f"torch {torch.__version__}: graphs without and with a hook")
kinds = {"Sequential": lambda: nn.Sequential(nn.Linear(8, 8)), "Linear": lambda: nn.Linear(8, 8), "a class of one's own": Own}
found = {name: (graphs(make(), False), graphs(make(), True)) for name, make in kinds.items()}
for name, both in found.items():
    print(f"  {name}: {both[0]}, {both[1]}")
if found != {"Sequential": (0, 1), "Linear": (0, 1), "a class of one's own": (1, 1)}:
    raise SystemExit("this torch does otherwise")
print("as described: a class of torch's is compiled only if it has a hook")
END
environment/bin/python -W ignore program.py
