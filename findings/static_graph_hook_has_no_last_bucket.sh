#!/usr/bin/env bash
# Question: a communication hook of DistributedDataParallel that does something once per backward, with the last bucket
# (GradBucket.is_last()), or keeps a state for each bucket (GradBucket.index(), as PowerSGD's error feedback does): does
# it see each number once, and a last bucket, in every backward?
# A good guess: yes. The buckets of a backward are numbered from 0, and one of them is the last.
# What happens: not in the first backward with static_graph=True, of a model whose parameters have two dtypes. DDP makes
# one bucket for each dtype then, and reduces them all where backward ends: each has the number 0, and none is the last.
# What is kept by number is kept of two buckets in one place, and what is to be done with the last bucket is not done.
# From the second backward on all is as expected; without static_graph always.
# Version: torch 2.13.0, on a CPU, over gloo.
# Source: tried. The page of communication hooks says of index() that it is the bucket's own, of is_last() that it is
# True for the last bucket of an iteration, and of neither that the first iteration of a static graph differs.
# Who meets it: authors of hooks, and of optimizers that step in one, where a part of the model is kept in float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
install() { environment/bin/pip install --quiet --disable-pip-version-check --retries 0 "$@" || exit 2; }
install torch==2.13.0 numpy==2.2.6
cat >program.py <<'END'
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x):
        return self.second(self.first(x).double())


def seen(static_graph):
    """Of three backwards, the number of each bucket, and whether it is the last."""
    model, buckets = DistributedDataParallel(TwoDtypes(), static_graph=static_graph), []

    def hook(state, bucket):
        buckets.append((bucket.index(), bucket.is_last()))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    found = []
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        found.append(list(buckets))
        buckets.clear()
    return found


with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    usual, static = seen(False), seen(True)
    dist.destroy_process_group()
print(f"torch {torch.__version__}, (index, is_last) of each bucket:")
for name, found in (("usual", usual), ("static_graph=True", static)):
    print(f"  {name}: {found}")
as_expected = [(0, False), (1, True)]
if usual != [as_expected] * 3 or static != [[(0, False), (0, False)], as_expected, as_expected]:
    raise SystemExit("this torch does otherwise")
print("as described: in the first backward of a static graph every bucket is number 0, and none is the last")
END
environment/bin/python -W ignore program.py
