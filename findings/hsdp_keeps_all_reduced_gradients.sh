#!/usr/bin/env bash
# Question: hooks of register_post_accumulate_grad_hook step each parameter of an FSDP2 model and set its .grad to None.
# How much of the gradients is alive at once, with fully_shard over a mesh of one dimension, and with HSDP (two)?
# A good guess: the same for both: those of one or two groups.
# What happens: with HSDP the reduced gradients of all groups stay in memory until backward ends, though no parameter
# has one. Each group keeps the buffer of its all-reduce, which its gradients are views of.
# Version: torch 2.13.0, CPU, gloo, 2 ranks. (The lines are there from 2.6.0 to 2.14.1.)
# Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, AllReduceState: the buffer is kept so that no later
# reduction gets its memory while the all-reduce runs on another stream.
# Who meets it: whoever frees gradients in backward of a model under HSDP. Nothing is wrong but the memory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install --quiet --disable-pip-version-check --retries 0 torch==2.13.0 numpy==2.2.6 || exit 2
cat >program.py <<'END'
import os
import sys
import weakref

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GROUPS = 6


def most_alive(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(GROUPS)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    buffers, most = [], 0

    def step(parameter):
        nonlocal most
        local = parameter.grad.to_local()
        base = local if local._base is None else local._base
        if not any(ref() is base for ref in buffers):
            buffers.append(weakref.ref(base))
        most = max(most, sum(ref() is not None for ref in buffers))
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(torch.ones(2, 8)).sum().backward()
    return most


def rank_main(rank, store, answers):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    one = most_alive(init_device_mesh("cpu", (2,)))
    two = most_alive(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    if rank == 0:
        answers.put((one, two))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answers = mp.get_context("spawn").Queue()
    mp.spawn(rank_main, (os.path.abspath("store"), answers), nprocs=2)
    one, two = answers.get(timeout=60)
    print(f"groups whose gradients were alive at once, of {GROUPS}: one dimension {one}, HSDP {two}")
    sys.exit(not (one <= 2 and two == GROUPS))
END
environment/bin/python -c 'import torch; print("torch", torch.__version__)'
environment/bin/python -W ignore program.py || {
    echo "this torch does otherwise" >&2
    exit 1
}
echo "as described: with HSDP all reduced gradients are alive at the end of backward"
