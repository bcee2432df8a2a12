#!/usr/bin/env bash
# Question: somebody holds a weakref.ref to a parameter, as caches, profilers and tools do. Does
# model.to(torch.float64) still work?
# A good guess: yes. A weak reference keeps nothing alive, and is no use of the parameter.
# What happens: with plain parameters yes. Where torch swaps parameters, which it does for parameters of a tensor
# subclass (quantized and sharded weights are such), and for all after
# torch.__future__.set_swap_module_params_on_conversion(True), it raises RuntimeError: "_apply(): Couldn't swap
# Linear.weight".
# Version: torch 2.13.0.
# Source: torch/utils/__init__.py, swap_tensors; torch/nn/modules/module.py, Module._apply.
# Who meets it: libraries that refer to parameters weakly, and whoever converts a model after them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
cat >program.py <<'END'
import weakref

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor


def converts(referred, swapped):
    torch.__future__.set_swap_module_params_on_conversion(swapped)
    model = nn.Linear(2, 2)
    reference = weakref.ref(model.weight) if referred else None
    try:
        model.to(torch.float64)
    except RuntimeError as error:
        return f"{error}: {error.__cause__ or error.__context__}"
    finally:
        del reference
    return str(model.weight.dtype)


def subclass_converts(referred):
    torch.__future__.set_swap_module_params_on_conversion(False)
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)))
    reference = weakref.ref(model.weight) if referred else None
    try:
        model.to(torch.float64)
    except RuntimeError as error:
        return f"{error}: {error.__cause__ or error.__context__}"
    finally:
        del reference
    return str(model.weight.dtype)


seen = {
    "plain, referred to": converts(True, False),
    "swapped": converts(False, True),
    "swapped, referred to": converts(True, True),
    "a subclass": subclass_converts(False),
    "a subclass, referred to": subclass_converts(True),
}
print(f"torch {torch.__version__}:")
for name, found in seen.items():
    print(f"  {name}: {found}")
converted = [found == "torch.float64" for found in seen.values()]
if converted != [True, True, False, True, False]:
    raise SystemExit("this torch does otherwise")
print("as described: a weak reference stops the conversion where parameters are swapped")
END
environment/bin/python -W ignore program.py
