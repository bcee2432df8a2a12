#!/usr/bin/env bash
# Question: torch.distributed.checkpoint takes objects with state_dict() and load_state_dict(). A model and its AdamW
# are saved so, and loaded into new ones. Does training go on with AdamW's moments?
# A good guess: yes. Both are such objects, the moments are in the file, and nothing raises.
# What happens: the weights are loaded, and of AdamW the learning rate and other options; no moments, no count of steps.
# load() asks the new optimizer's state_dict() what there is to read, and without a step it has no state.
# get_optimizer_state_dict() in a wrapper, which makes the state first, reads all.
# Version: torch 2.13.0, CPU, one process.
# Source: torch/distributed/checkpoint/state_dict_loader.py, load: what the object's own state_dict() has is read.
# Who meets it: whoever resumes by DCP without the wrapper of its tutorial. The loss goes on falling, more slowly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check --retries 0 torch==2.13.0 numpy==2.2.6 || exit 2
cat >program.py <<'END'
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def made(lr):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


class Wrapped:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


def found(optimizer):
    return len(optimizer.state), optimizer.param_groups[0]["lr"]


model, optimizer = made(lr=0.125)
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id="as_it_is")
dcp.save({"model": model, "wrapped": Wrapped(model, optimizer)}, checkpoint_id="wrapped")

as_it_is = made(lr=0.5)
dcp.load({"model": as_it_is[0], "optimizer": as_it_is[1]}, checkpoint_id="as_it_is")
wrapped = made(lr=0.5)
dcp.load({"model": wrapped[0], "wrapped": Wrapped(*wrapped)}, checkpoint_id="wrapped")
same_weights = all(torch.equal(model.weight, other.weight) for other in (as_it_is[0], wrapped[0]))
print("weights of both are those saved:", same_weights)
print("parameters with state, and learning rate: saved", found(optimizer), "as it is", found(as_it_is[1]),
      "wrapped", found(wrapped[1]))
raise SystemExit(not (same_weights and found(as_it_is[1]) == (0, 0.125) and found(wrapped[1]) == (2, 0.125)))
END
environment/bin/python -c 'import torch; print("torch", torch.__version__)'
environment/bin/python -W ignore program.py || {
    echo "this torch does otherwise" >&2
    exit 1
}
echo "as described: the optimizer has no state after the load"
