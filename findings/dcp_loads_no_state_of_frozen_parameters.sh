#!/usr/bin/env bash
# Question: a model and its AdamW are saved by torch.distributed.checkpoint and its get_state_dict(), and loaded into
# the same training run, in which one layer happens to be frozen (requires_grad_(False)) just then, to be thawed
# later. Is all of the optimizer's state there after the load?
# A good guess: yes. The file has it, the optimizer holds the layer's parameters, and nothing is said.
# What happens: the frozen layer's entries are gone after set_state_dict(), those that the optimizer had before the
# load too. Thawed, the layer starts with new moments and a step count of 0. Frozen while saving does no harm.
# Version: torch 2.13.0, CPU, one process.
# Source: torch/distributed/checkpoint/state_dict.py, _split_optim_state_dict: state is taken over where requires_grad
# is.
# Who meets it: loops that freeze and thaw layers or networks in turn, and resume, or go back, in the middle.
# In its place: requires_grad_(True) for all parameters around the load.
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def entries_after_load(freeze):
    model, optimizer = trained()
    if freeze:
        model[1].requires_grad_(False)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id="saved")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return len(optimizer.state)


model, optimizer = trained()
model[1].requires_grad_(False)
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id="saved")
found = len(state["state"]), entries_after_load(freeze=True), entries_after_load(freeze=False)
print("entries of state: in what is saved, loaded with a frozen layer, loaded with none:", found)
raise SystemExit(found != (4, 2, 4))
END
environment/bin/python -c 'import torch; print("torch", torch.__version__)'
environment/bin/python -W ignore program.py || {
    echo "this torch does otherwise" >&2
    exit 1
}
echo "as described: frozen parameters lose their state in the load"
