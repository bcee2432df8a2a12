"""Half a step is never committed, on any rank: an error in a backward over weights that DDP's first has stepped."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.errors import AccumulationError, InstepError, TornStepError
from tests.distributed.pool import RankPool
from tests.parts import Parts, raising, values

SAID = "weights that the first backward has already updated"


def second_backward(kind: str) -> tuple[str, str, bool]:
    """What the second backward has raised, what ``step()`` has then, and whether a torn one has left the weights."""
    model = DistributedDataParallel(Parts(), find_unused_parameters=True, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = instep.attach(model, optimizer, schedule="backward")
    parts: Any = model.module
    told = []
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hidden = parts.trunk(torch.ones(3, 4))
    second = parts.second(hidden).square().sum()
    model(torch.ones(3, 4)).sum().backward()
    try:
        if kind == "user" and dist.get_rank() == 0:
            raising(second, ValueError).backward()
        elif kind == "user":
            pass
        else:
            second.backward()
        told.append("nothing")
    except (AccumulationError, ValueError) as error:
        told.append(f"{type(error).__name__}: {error}")
    before = values(model) if overlap.state == "torn" else None
    try:
        optimizer.step()
        told.append("stepped")
    except InstepError as error:
        told.append(f"{type(error).__name__}: {error}")
    same = before is not None and all(map(torch.equal, before, values(model)))
    overlap.accept_torn()
    overlap.detach()
    dist.barrier()
    return told[0], told[1], same


def test_a_second_backward_over_stepped_weights(two_ranks: RankPool) -> None:
    for raised, stepped, same in two_ranks.run(second_backward, "stepped weights"):
        assert raised.startswith("AccumulationError")
        assert SAID in raised
        assert stepped.startswith(TornStepError.__name__)
        assert same


def test_an_error_of_one_rank_s_loop_in_a_second_backward(two_ranks: RankPool) -> None:
    (raised, stepped, same), (other, others, _) = two_ranks.run(second_backward, "user")
    assert raised == "ValueError: the loop's own"
    assert other == "nothing"
    assert stepped.startswith(TornStepError.__name__)
    assert same
    # The other rank's step is whole. It may be committed before that rank has heard.
    assert others == "stepped" or others.startswith(TornStepError.__name__)


def steps_in_a_callback(wrap: str, way: str) -> tuple[bool, str]:
    """A loop that queues its ``step()`` for the end of each backward, at an output of the model: whether it is the
    plain one, and what it raises."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    found = []
    attached: dict[str, Any] = {"schedule": "backward"} | ({"undo": True} if way == "undo" else {}) if way else {}
    for options in (None, attached):
        module = Parts()
        module.second.requires_grad_(False)  # every bucket is full where backward ends
        model: Any = module
        if wrap == "ddp":
            model = DistributedDataParallel(module, find_unused_parameters=True)
        elif wrap == "fsdp2":
            fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        overlap = None if options is None else instep.attach(model, optimizer, **options)

        def end(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        try:
            for _ in range(3):
                output = model(torch.ones(3, 4))
                output.register_hook(lambda gradient, end=end: queue(end))
                output.square().sum().backward()
        except AccumulationError as error:
            return False, str(error)
        finally:
            if overlap is not None:
                overlap.accept_torn()
                overlap.detach()
        found.append([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])
    return all(map(torch.equal, *found)), ""


@pytest.mark.parametrize("way", ["", "backward", "undo"])
@pytest.mark.parametrize("wrap", ["one device", "ddp", "fsdp2"])
def test_a_step_in_a_callback_of_backward(two_ranks: RankPool, wrap: str, way: str) -> None:
    for same, said in two_ranks.run(steps_in_a_callback, wrap, way):
        if wrap == "ddp" and way:
            assert "SGD.step() was called in the running backward, by a callback" in said
            assert "once backward() has returned" in said
        else:
            assert same
