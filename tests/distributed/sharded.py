"""Models sharded in all the ways there are, and two loops over each, side by side."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import instep
from instep_tools.harness import first_difference, training_state
from tests.cases import Blocks, batch
from tests.devices import here
from tests.late import late_updates

Shard = Callable[[nn.Module], nn.Module]
loss_of = nn.functional.cross_entropy
WAYS: Mapping[str, Mapping[str, Any]] = {
    "backward": {"schedule": "backward"},
    "forward": {"schedule": "forward", "defer": True},
    "late": {"schedule": "forward", "defer": True},  # no update runs before somebody waits for it
    "undo": {"schedule": "backward", "undo": True},
}


in_every_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.nightly] if way in ("late", "undo") else []) for way in WAYS]
)
"""The harder two nightly."""


def sampled(names: Iterable[str], every: int, ways: Iterable[str] = tuple(WAYS)) -> list[Any]:
    """Names of cases by way: some in all ways, the others in one each; nightly, all in all."""
    found = []
    for number, name in enumerate(names):
        for way in ways:
            one = number % every == 0 or way == ("backward", "forward")[number % 2]
            found.append(pytest.param(name, way, marks=[] if one else [pytest.mark.nightly]))
    return found


@cache
def mesh(*sizes: int) -> Any:
    """One of each shape in a process: each makes groups, whose threads are there to stay, and wake all the time."""
    names = ("dp", "tp")[: len(sizes)] if len(sizes) < 3 else ("replicate", "dp", "tp")
    return init_device_mesh(here().type, sizes, mesh_dim_names=names)


def nested(model: Any, **options: Any) -> nn.Module:
    """Each block, and the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, gathered."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """What ``training_state`` gives, DTensors as their local tensors and their layout."""
    for name, value in training_state(model, optimizer):
        if isinstance(value, DTensor):
            yield name, value.to_local().clone()
            yield f"the layout of {name}", (value.placements, value.shape, value.stride(), value.device_mesh)
        else:
            yield name, value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


Step = Callable[["Loop", int], Any]


class Loop:
    """One of the two."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.overlap: Any = None

    def learn(self, i: int, rank: int | None = None) -> Any:
        """An iteration of the usual kind, with data of this rank's own."""
        self.backward(i)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, i: int) -> torch.Tensor:
        x, y = batch(i * dist.get_world_size() + dist.get_rank())
        return loss_of(self.model(x), y)

    def backward(self, i: int) -> torch.Tensor:
        loss = self.loss(i)
        loss.backward()
        return loss.detach()


def both(
    way: str,
    shard: Shard,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    step: Step = Loop.learn,
    build: Callable[[], nn.Module] = Blocks,
    steps: int = 5,
    attach: bool = True,
    **options: Any,
) -> Loop:
    """Train plain and attached, and compare bit for bit after every step what this rank holds, and what ``step``
    returns."""
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        model = shard(build())
        loops.append(Loop(model, make_optimizer(model)))
    plain, loop = loops
    loop.overlap = instep.attach(loop.model, loop.optimizer, **{**WAYS[way], **options})
    with late_updates() if way == "late" else nullcontext():
        for i in range(steps):
            expected = step(plain, i)
            found = step(loop, i)
            if isinstance(expected, torch.Tensor):
                assert torch.equal(expected, found), f"iteration {i}: {expected} and {found}"
            if way == "late" and i < steps - 1:
                continue
            loop.overlap.synchronize()
            difference = first_difference(
                parameters_of(plain.model, plain.optimizer), parameters_of(loop.model, loop.optimizer)
            )
            assert difference is None, f"rank {dist.get_rank()}, iteration {i}: {difference}"
    assert loop.overlap.step_count == steps
    loop.overlap.detach()
    return loop


def fsdp1(model: Any, **options: Any) -> nn.Module:
    """Each block, and the rest."""
    warnings.simplefilter("ignore")
    device = here()
    options = {"use_orig_params": True, "device_id": device, **options}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def tensor_parallel(model: Any, tp: Any, *, norms: bool = False) -> nn.Module:
    """The two linear layers of each block, split over ranks."""
    for block in model.blocks:
        plan: dict[str, Any] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        if norms:
            plan["0"] = SequenceParallel(sequence_dim=0, use_local_output=True)
            plan["1"] = ColwiseParallel(input_layouts=torch.distributed.tensor.Shard(0))
        parallelize_module(block, tp, plan)
    return model


def hsdp(model: nn.Module) -> nn.Module:
    return nested(model, mesh=mesh(2, 2))


def two_d(model: nn.Module) -> nn.Module:
    """FSDP2 over tensor parallelism."""
    both_dims = mesh(2, 2)
    tensor_parallel(model, both_dims["tp"])
    return nested(model, mesh=both_dims["dp"])


def three_d(model: nn.Module) -> nn.Module:
    """HSDP over tensor parallelism: eight ranks."""
    all_dims = mesh(2, 2, 2)
    tensor_parallel(model, all_dims["tp"])
    return nested(model, mesh=all_dims["replicate", "dp"])


def apart(model: Any) -> nn.Module:
    """Some blocks are split by tensor parallelism alone, the rest is FSDP2's: no mesh has all ranks."""
    both_dims = mesh(2, 2)
    split, *others = model.blocks
    parallelize_module(split, both_dims["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    for block in others:
        fully_shard(block, mesh=both_dims["dp"])
    return model


def tp_alone(model: nn.Module) -> nn.Module:
    return tensor_parallel(model, mesh(torch.distributed.get_world_size()))
