"""HSDP, tensor parallelism, and both of FSDP2 and tensor parallelism: four ranks, and two."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import instep
from tests.cases import Blocks, grad_of, two_groups
from tests.distributed.pool import RankPool
from tests.distributed.sharded import (
    WAYS,
    Loop,
    both,
    hsdp,
    in_every_way,
    mesh,
    nested,
    tensor_parallel,
    tp_alone,
    two_d,
    whole,
)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, **options)


def hsdp_of_two(model: nn.Module) -> nn.Module:
    return nested(model, mesh=mesh(2, 1))


def one_mesh(model: nn.Module) -> nn.Module:
    """All parameters on both dimensions, as torch's own clip_grad_norm_ needs them."""
    both_dims = mesh(2, 2)
    tensor_parallel(model, both_dims["tp"])
    replicate = [torch.distributed.tensor.Replicate()]

    def everything_else(name: str, module: nn.Module, tp: Any) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            made = torch.distributed.tensor.distribute_tensor(parameter.detach(), tp, replicate)
            module.register_parameter(key, nn.Parameter(made))

    for _name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(isinstance(p, torch.distributed.tensor.DTensor) for p in own):
            torch.distributed.tensor.distribute_module(
                module,
                both_dims["tp"],
                everything_else,
                lambda module, inputs, tp: tuple(  # type: ignore[arg-type]  # what it returns becomes the inputs
                    torch.distributed.tensor.DTensor.from_local(x, tp, replicate) for x in inputs
                ),
                lambda module, output, tp: output.to_local(),
            )
    return nested(model, mesh=both_dims["dp"])


def same_data(loop: Loop, i: int) -> None:
    """Ranks of one tensor-parallel group see the same data."""
    from tests.cases import batch

    x, y = batch(i)
    nn.functional.cross_entropy(loop.model(x), y).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


SHARDS = {"hsdp": hsdp, "hsdp of two": hsdp_of_two, "tp": tp_alone, "2d": two_d, "2d, one mesh": one_mesh}


def trained(name: str, way: str, foreach: bool) -> None:
    step = Loop.learn if name.startswith("hsdp") else same_data
    both(way, SHARDS[name], partial(adamw, foreach=foreach), step)


@in_every_way
@pytest.mark.parametrize("name", ["hsdp", "tp", "2d", pytest.param("2d, one mesh", marks=pytest.mark.nightly)])
def test_four_ranks(four_ranks: RankPool, name: str, way: str) -> None:
    four_ranks.run(trained, name, way, name in ("hsdp", "2d, one mesh"))


@in_every_way
@pytest.mark.parametrize("name", ["hsdp of two", "tp"])
def test_two_ranks(two_ranks: RankPool, name: str, way: str) -> None:
    two_ranks.run(trained, name, way, False)


class WithSpares(Blocks):
    """Some of each kind of parameter get no gradient in every other iteration."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.inner(x)
        for block in list(self.blocks)[: 2 + self.calls % 2]:
            x = x + block(x)
        return self.outer(x)


def mixed(way: str, form: str) -> None:
    """The oracle is the for-loop form, which is equal to foreach here: torch's foreach refuses the mix."""
    torch.manual_seed(0)
    plain = tp_alone(WithSpares())
    torch.manual_seed(0)
    model = tp_alone(WithSpares())
    plain_optimizer, optimizer = adamw(plain, foreach=False), adamw(model, **{form: True})
    with instep.attach(model, optimizer, bucket_bytes=2000, **WAYS[way]) as overlap:
        for i in range(5):
            same_data(Loop(plain, plain_optimizer), i)
            same_data(Loop(model, optimizer), i)
            overlap.synchronize()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                a, b = (getattr(t, "to_local", t.detach)() for t in (p, q))
                if form == "foreach":
                    assert torch.equal(a, b), f"step {i}"
                else:  # another kernel, which rounds in other places
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["foreach", "fused"])
@pytest.mark.parametrize("way", ["backward", "forward"])
def test_plain_and_sharded_parameters_in_one_optimizer(two_ranks: RankPool, way: str, form: str) -> None:
    two_ranks.run(mixed, way, form)


def clips(loop: Loop, i: int) -> torch.Tensor:
    from tests.cases import batch

    x, y = batch(i)
    nn.functional.cross_entropy(loop.model(x), y).backward()
    if loop.overlap is None:
        norm = whole(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.3))
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return norm if loop.overlap is None else loop.overlap.grad_norm


def clipped(way: str, name: str) -> None:
    both(way, SHARDS[name], adamw, clips, clip=instep.ClipNorm(0.3))


@pytest.mark.parametrize("name", ["hsdp", pytest.param("2d, one mesh", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("way", ["forward", "undo"])
def test_the_norm_over_two_dimensions(four_ranks: RankPool, way: str, name: str) -> None:
    four_ranks.run(clipped, way, name)


def norm_of_a_mix() -> tuple[float, float]:
    """Plain parameters beside sharded ones: torch has no norm of these."""
    torch.manual_seed(0)
    model = tp_alone(Blocks())
    optimizer = adamw(model)
    from tests.cases import batch

    x, y = batch(0)
    with instep.attach(model, optimizer, schedule="forward", defer=True, clip=instep.ClipNorm(1e9)) as overlap:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert overlap.grad_norm is not None
        found = overlap.grad_norm.item()
    torch.manual_seed(0)
    whole = Blocks()
    nn.functional.cross_entropy(whole(x), y).backward()
    return found, nn.utils.get_total_norm([grad_of(p) for p in whole.parameters()]).item()


def test_the_norm_of_plain_and_sharded_gradients(two_ranks: RankPool) -> None:
    for found, expected in two_ranks.run(norm_of_a_mix):
        assert found == pytest.approx(expected, rel=1e-5)  # another order of summation


def held_all_reduce(loop: Loop, i: int) -> None:
    """Micro-batches that are reduced among the shards, and among the replicas only in the last."""
    for last in (False, True):
        loop.model.set_requires_all_reduce(last)
        loop.backward(2 * i + last)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def reduced_in_two_parts(way: str) -> None:
    both(way, hsdp, adamw, held_all_reduce)


@in_every_way
def test_hsdp_accumulates_before_its_all_reduce(four_ranks: RankPool, way: str) -> None:
    four_ranks.run(reduced_in_two_parts, way)
