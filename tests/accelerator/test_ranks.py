"""Collectives on the emulated device: NCCL's manners, gloo's bytes."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator.device import emu
from tests.accelerator.recording import Log, recorded
from tests.distributed.pool import RankPool
from tests.distributed.sharded import whole

pytestmark = pytest.mark.accelerator
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
NEW = TORCH >= (2, 8)
"""NCCL runs what is not asynchronous on the current stream, and works keep their tensors."""


def _kinds(log: Log) -> list[str]:
    return sorted({finding.kind for finding in log.findings})


def _found(log: Log) -> list[str]:
    return [str(finding) for finding in log.findings]


# Collectives: each returns what the ranks have afterwards.


def _all_to_all(x: torch.Tensor) -> list[torch.Tensor]:
    outs = [torch.empty_like(part) for part in x.chunk(dist.get_world_size())]
    dist.all_to_all(outs, list(x.chunk(dist.get_world_size())))
    return outs


def _all_to_all_single(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def _all_gather(x: torch.Tensor) -> list[torch.Tensor]:
    outs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, x)
    return outs


def _gather_into(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(dist.get_world_size() * len(x))
    dist.all_gather_into_tensor(out, x)
    return out


def _gather(x: torch.Tensor) -> list[torch.Tensor]:
    outs = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(x, outs, dst=0)
    return outs or []


def _scatter(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x.chunk(dist.get_world_size())[0])
    dist.scatter(out, list(x.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None, src=0)
    return out


def _reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x.chunk(dist.get_world_size())[0])
    dist.reduce_scatter_tensor(out, x)
    return out


def _reduce_scatter_list(x: torch.Tensor) -> torch.Tensor:
    parts = [part.clone() for part in x.chunk(dist.get_world_size())]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts)
    return out


def _reduced(op: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, op)
        return x

    return run


def _reduce(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.reduce(x, dst=1)
    return x if dist.get_rank() == 1 else x[:0]


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.broadcast(x, src=1)
    return x


def _ring(x: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


def _send_and_receive(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    if dist.get_rank() == 0:
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        dist.recv(out, 0)
    return out


def _coalesced(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [part.clone() for part in x.chunk(3)]
    with dist._coalescing_manager(device=x.device if x.device.type == "emu" else None, async_ops=True) as works:
        for part in parts:
            dist.all_reduce(part)
    works.wait()
    return parts


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": _reduced(dist.ReduceOp.SUM),
    "all_reduce max": _reduced(dist.ReduceOp.MAX),
    "all_reduce min": _reduced(dist.ReduceOp.MIN),
    "all_reduce product": _reduced(dist.ReduceOp.PRODUCT),
    "all_reduce band": lambda x: _reduced(dist.ReduceOp.BAND)(x.mul(100).long()),
    "all_reduce bfloat16": lambda x: _reduced(dist.ReduceOp.SUM)(x.bfloat16()),
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _gather_into,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter_list,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "batch_isend_irecv": _ring,
    "send and recv": _send_and_receive,
    "coalesced": _coalesced,
}


def _values(device: str) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [t.cpu() for t in ([result] if isinstance(result, torch.Tensor) else result)]


def _collective_body(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    plain = _tensors(COLLECTIVES[name](_values("cpu")))
    with recorded() as log:
        ours = _tensors(COLLECTIVES[name](_values("emu")))
    return ours, plain, _found(log)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_have_the_bits_of_gloo(four_emulated_ranks: RankPool, name: str) -> None:
    if name == "reduce_scatter" and not NEW:
        pytest.skip("gloo has none for lists")
    for ours, plain, found in four_emulated_ranks.run(_collective_body, name):
        assert len(ours) == len(plain)
        assert all(map(torch.equal, ours, plain))
        assert found == []


def _more_than_gloo() -> list[str]:
    x, size = _values("emu"), dist.get_world_size()
    with recorded() as log:
        summed = _reduced(dist.ReduceOp.SUM)(x)
        assert torch.equal(_reduced(dist.ReduceOp.AVG)(x), summed / size)
        half = dist._make_nccl_premul_sum(0.5)
        assert torch.equal(_reduced(half)(x), _reduced(dist.ReduceOp.SUM)(x * 0.5))
        out = torch.empty(3, device="emu")
        dist.reduce_scatter_tensor(out, x, dist.ReduceOp.AVG)
        assert torch.allclose(out, (summed / size)[3 * dist.get_rank() :][:3])
        parts = _all_to_all(x)
        assert torch.equal(torch.cat(parts), _all_to_all_single(x))
        with dist._coalescing_manager(device=x.device, async_ops=True) as works:
            gathered = [_gather_into_later(part) for part in x.chunk(2)]
        works.wait()
        assert torch.equal(gathered[0][:6], x.new_tensor(_gather_into(x)[:6].tolist()))
        dist.barrier(device_ids=[0])
    assert any("barrier" in wait for wait in log.host_waits) or not NEW  # before, torch took the CPU's
    assert dist.get_backend() == "emu"
    return _found(log)


def _gather_into_later(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(dist.get_world_size() * len(x))
    dist.all_gather_into_tensor(out, x, async_op=True)
    return out


def test_what_gloo_has_not(four_emulated_ranks: RankPool) -> None:
    assert four_emulated_ranks.run(_more_than_gloo) == [[]] * 4


# Order.


def _order_body(case: str) -> tuple[list[str], int]:
    x = torch.ones(8, device="emu")
    side = torch.Stream("emu")
    torch.accelerator.synchronize()
    with recorded() as log:
        if case == "sync":
            dist.all_reduce(x)
            x.add_(1)
        elif case == "waited":
            dist.all_reduce(x, async_op=True).wait()
            x.add_(1)
        elif case == "not waited":
            work = dist.all_reduce(x, async_op=True)
            x.add_(1)
            work.wait()
        elif case == "waited on another stream":
            work = dist.all_reduce(x, async_op=True)
            with emu().stream(side):
                work.wait()
            x.add_(1)
        elif case == "launched from a stream that does not wait":
            x.mul_(2)
            with emu().stream(side):
                dist.all_reduce(x)
        elif case == "future":
            dist.all_reduce(x, async_op=True).get_future().wait()
            x.add_(1)
        elif case == "then":
            y = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].mul_(2)).wait()
            y.add_(1)
        elif case == "then, not waited":
            dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].mul_(2))
            x.add_(1)
        elif case == "asked":
            work = dist.all_reduce(x, async_op=True)
            assert [work.is_completed(), work.is_completed(), work.is_completed()] == [False, True, True]
            x.add_(1)
        elif case == "asked once":
            work = dist.all_reduce(x, async_op=True)
            work.is_completed()
            x.add_(1)
    torch.accelerator.synchronize()
    return _kinds(log), len(log.streams)


@pytest.mark.parametrize(
    ("case", "kinds", "streams"),
    [
        ("sync", [], 1 if NEW else 2),
        ("waited", [], 2),
        ("not waited", ["race"], 2),
        ("waited on another stream", ["race"], 2),
        ("launched from a stream that does not wait", ["race"], 2),
        ("future", [], 2),
        ("then", [], 3),
        ("then, not waited", ["race"], 3),
        ("asked", [], 2),
        ("asked once", ["race"], 2),
    ],
)
def test_order(two_emulated_ranks: RankPool, case: str, kinds: list[str], streams: int) -> None:
    assert two_emulated_ranks.run(_order_body, case) == [(kinds, streams)] * 2


def _freed_body(manner: str) -> tuple[list[str], int, int]:
    """The input is dropped while the collective runs: the work keeps it, until somebody waits."""
    out = torch.empty(2000, device="emu")
    dist.all_gather_into_tensor(out, out[:1000].clone())
    torch.accelerator.synchronize()
    if manner == "record_stream":
        os.environ["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "0"
    before = emu().memory_allocated()
    with recorded() as log:
        x = torch.ones(1000, device="emu")
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        del x
        if manner == "dropped":
            del work
        y = torch.empty(1000, device="emu")
        kept = emu().memory_allocated() - before
        if manner == "dropped":
            torch.accelerator.synchronize()
            dist.all_gather_into_tensor(out, out[:1000])
        else:
            work.wait()
        left = emu().memory_allocated() - before
    del y
    os.environ.pop("TORCH_NCCL_AVOID_RECORD_STREAMS", None)
    return _kinds(log), kept, left


@pytest.mark.parametrize(("manner", "kept"), [("kept by the work", 8000), ("dropped", 8000), ("record_stream", 4000)])
def test_tensors_of_a_running_collective(two_emulated_ranks: RankPool, manner: str, kept: int) -> None:
    expected = kept if NEW else 4000
    assert two_emulated_ranks.run(_freed_body, manner) == [([], expected, 4000)] * 2


# A rank that launches does not wait for the others.


def _late_body() -> tuple[float, float]:
    x = torch.ones(8, device="emu")
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    launched = time.monotonic() - start
    x.add_(1)
    ran = time.monotonic() - start
    assert x.tolist() == [3.0] * 8
    return launched, ran


def test_launches_do_not_block(two_emulated_ranks: RankPool) -> None:
    (launched, ran), _ = two_emulated_ranks.run(_late_body)
    assert launched < 0.4
    assert ran > 0.4


def _crossed_body() -> list[float]:
    """Two groups in different orders on different ranks: on streams of their own, they do not wait for one another."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1], backend="emu")]
    tensors = [torch.full((4,), float(i + 1), device="emu") for i in range(2)]
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    with recorded() as log:
        works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
        for i in range(2):
            works[i].wait()
        total = (tensors[0] + tensors[1]).tolist()
    log.assert_ordered()
    for group in groups:
        dist.destroy_process_group(group)
    return total


def test_groups_in_different_orders(two_emulated_ranks: RankPool) -> None:
    assert two_emulated_ranks.run(_crossed_body) == [[6.0] * 4] * 2


def _groups_body() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    mesh = init_device_mesh("emu", (2, 2), mesh_dim_names=("outer", "inner"))
    x = torch.full((2,), float(rank), device="emu")
    dist.all_reduce(x, group=mesh.get_group("outer"))
    assert x.tolist() == [2.0 * (rank % 2) + 2] * 2
    assert dist.get_backend(mesh.get_group("inner")) == "emu"
    some = dist.new_group([1, 2, 3])
    if rank > 0:
        y = torch.full((2,), float(rank), device="emu")
        dist.all_reduce(y, group=some)
        assert y.tolist() == [6.0] * 2
        host = torch.ones(2)
        dist.all_reduce(host, group=some)
        assert host.tolist() == [3.0] * 2
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == [0, 1, 2, 3]


def test_groups_of_fewer_ranks(four_emulated_ranks: RankPool) -> None:
    four_emulated_ranks.run(_groups_body)


def _destroyed_body() -> float:
    group = dist.new_group([0, 1])
    x = torch.ones(4, device="emu")
    start = time.monotonic()
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, group=group, async_op=True)  # the other rank does not come
        del work
    dist.destroy_process_group(group)
    return time.monotonic() - start


def test_a_destroyed_group_does_not_hang() -> None:
    pool = RankPool(2, backend="emu")
    try:
        assert all(took < 10 for took in pool.run(_destroyed_body))
    finally:
        pool.stop()


def _dying_body() -> list[str]:
    x = torch.ones(4, device="emu")
    dist.all_reduce(x)
    x.add_(1)
    torch.accelerator.synchronize()
    if dist.get_rank() == 1:
        os._exit(1)
    raised = []
    dist.all_reduce(x, async_op=True).wait()
    for step in (lambda: x.add_(1), torch.accelerator.synchronize):
        try:
            step()
        except RuntimeError as error:
            raised.append(str(error))
    return raised


def test_a_rank_that_dies_is_an_error_where_it_is_waited_for() -> None:
    pool = RankPool(2, backend="emu")
    raised = pool.run_until_a_rank_dies(0, _dying_body)
    assert len(raised) >= 1
    assert "peer" in raised[0] or "Connection" in raised[0], raised


# Training.


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def _ddp(device: str) -> DistributedDataParallel:
    return DistributedDataParallel(_model().to(device), bucket_cap_mb=0.0002, gradient_as_bucket_view=True)


def _ddp_hooked(device: str) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = _ddp(device)
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def _fsdp2(device: str, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model().to(device)
    hybrid = options.pop("hybrid", False)
    shape, names = ((2, 2), ("replicate", "shard")) if hybrid else ((dist.get_world_size(),), ("shard",))
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **options)
    return model


def _mixed(device: str) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return _fsdp2(device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def _offloaded(device: str) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp2(device, offload_policy=CPUOffloadPolicy(pin_memory=device == "emu"))


def _fsdp1(device: str) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(_model(), device_id=torch.device(device, 0), use_orig_params=True)


def _tensor_parallel(device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return parallelize_module(_model().to(device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


WAYS: dict[str, Callable[[str], nn.Module]] = {
    "ddp": _ddp,
    "ddp with a hook": _ddp_hooked,
    "fsdp2": _fsdp2,
    "fsdp2 in mixed precision": _mixed,
    "fsdp2 offloaded": _offloaded,
    "fsdp1": _fsdp1,
    "tensor parallel": _tensor_parallel,
}


def _train(make: Callable[[str], nn.Module], device: str) -> list[torch.Tensor]:
    model = make(device)
    # Nor does it have foreach operators for the mixture.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False if make is _tensor_parallel else None)
    generator = torch.Generator().manual_seed(0 if make is _tensor_parallel else dist.get_rank())
    for _ in range(4):
        x = torch.randn(4, 8, generator=generator).to(device)
        model(x).square().mean().backward()
        if make is not _tensor_parallel:  # torch clips no mixture of DTensors and others
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().cpu() for p in parameters]


def _training_body(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str], int]:
    plain = [] if name == "fsdp1" else _train(WAYS[name], "cpu")
    with recorded() as log:
        ours = _train(WAYS[name], "emu")
    return ours, plain, _found(log), len(log.streams)


@pytest.mark.parametrize("name", WAYS)
def test_training_on_two_ranks(two_emulated_ranks: RankPool, name: str) -> None:
    for ours, plain, found, streams in two_emulated_ranks.run(_training_body, name):
        assert found == []
        if name in ("fsdp1", "fsdp2 in mixed precision"):
            assert all(t.isfinite().all() for t in ours)
        else:
            assert len(ours) == len(plain)
            for our, their in zip(ours, plain, strict=True):
                torch.testing.assert_close(our, their)
            if name.startswith("ddp"):
                assert all(map(torch.equal, ours, plain))
        assert streams >= 2


def _hybrid(device: str) -> nn.Module:
    return _fsdp2(device, hybrid=True)


def _hybrid_body() -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    plain = _train(_hybrid, "cpu") if NEW else []
    with recorded() as log:
        ours = _train(_hybrid, "emu")
    return ours, plain, _found(log)


def test_hybrid_sharding_on_four_ranks(four_emulated_ranks: RankPool) -> None:
    for ours, plain, found in four_emulated_ranks.run(_hybrid_body):
        assert found == []
        assert len(plain) == (len(ours) if NEW else 0)  # torch 2.6 does not shard on a CPU
        for our, their in zip(ours, plain, strict=False):
            torch.testing.assert_close(our, their)


def _checkpoint_body(folder: str) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _fsdp2("emu")
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    with recorded() as log:
        model, optimizer = made()
        model(torch.ones(2, 8, device="emu")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
        twin, twins_optimizer = made()
        of_twin, of_twins_optimizer = get_state_dict(twin, twins_optimizer)
        dcp.load({"model": of_twin, "optimizer": of_twins_optimizer}, checkpoint_id=folder)
        set_state_dict(twin, twins_optimizer, model_state_dict=of_twin, optim_state_dict=of_twins_optimizer)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(one), whole(other))
    return _found(log)


def test_distributed_checkpoints(two_emulated_ranks: RankPool, tmp_path: Any) -> None:
    assert two_emulated_ranks.run(_checkpoint_body, str(tmp_path)) == [[], []]
