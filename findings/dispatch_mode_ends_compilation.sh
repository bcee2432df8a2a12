#!/usr/bin/env bash
# Question: a function of torch.compile is called once under a TorchDispatchMode, as a FLOP counter is one. Are the
# calls after it, without the mode, compiled?
# A good guess: yes. What runs under the mode is not compiled, and the mode is over.
# What happens: no. From that call on the function runs uncompiled, and without a word: what was compiled before is
# not used any more, and neither a new shape nor another torch.compile() of the function compiles it.
# torch._dynamo.reset() ends that.
# Version: torch 2.13.0.
# Source: torch/_dynamo/convert_frame.py, CatchErrorsWrapper, which skips the frame where a mode is on the stack;
# torch/_dynamo/types.py, ConvertFrameReturn.apply_to_code, by which the code is skipped from then on.
# Who meets it: whoever measures the FLOPs or the memory of one step by a mode, and then trains.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
cat >program.py <<'END'
import torch
from torch.utils.flop_counter import FlopCounterMode

ran = []


def backend(graph, inputs):
    def compiled(*args):
        ran.append(1)
        return graph.forward(*args)

    return compiled


def product(x):
    return x @ x


def compiled_runs(call, *args):
    before = len(ran)
    call(*args)
    return len(ran) - before


x = torch.ones(2, 2)
call = torch.compile(product, backend=backend)
seen = {"compiled, before": compiled_runs(call, x)}
with FlopCounterMode(display=False):
    call(x)
seen["compiled, after"] = compiled_runs(call, x)
seen["compiled, another shape"] = compiled_runs(call, torch.ones(3, 3))
seen["compiled, torch.compile() again"] = compiled_runs(torch.compile(product, backend=backend), x)
torch._dynamo.reset()
seen["compiled, after reset()"] = compiled_runs(call, x)
print(f"torch {torch.__version__}: {seen}")
if list(seen.values()) != [1, 0, 0, 0, 1]:
    raise SystemExit("this torch does otherwise")
print("as described: uncompiled for good after one call under the mode")
END
environment/bin/python -W ignore program.py
