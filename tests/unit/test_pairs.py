"""Each row of the table of pairs: the refusal of the two together, and no refusal once one of them is left out."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import instep
from instep import ClipNorm, ClipValue
from instep._refusals import rules
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target
from tests.loops.table import written
from tests.pairs import PAGE, PAIRS, rendered

# Models, as small as may be.


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def sparse() -> nn.Module:
    return nn.Embedding(2, 2, sparse=True)


def several() -> list[nn.Module]:
    return [linear(), linear()]


def ddp(**options: Any) -> nn.Module:
    return DistributedDataParallel(linear(), **options)


def ddp_in_part() -> nn.Module:
    return nn.Sequential(ddp(), linear())


def replicated() -> nn.Module:
    return instep.replicate(linear())


def sharded() -> nn.Module:
    model = linear()
    fully_shard(model)
    return model


def sharded_flat() -> nn.Module:
    return FullyShardedDataParallel(linear(), use_orig_params=True, device_id=torch.device("cpu"))


def one_stage() -> nn.Module:
    """On ranks: a stage asks for its own."""
    return linear()


def schedule_of(model: nn.Module) -> Schedule1F1B:
    return Schedule1F1B(PipelineStage(model, 0, 1, torch.device("cpu")), 2, loss_fn=nn.functional.mse_loss)


class OwnSGD(torch.optim.SGD):
    """Not torch's own: it may draw random numbers."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise NotImplementedError


class Case(NamedTuple):
    """What meets one row.

    Attributes:
        option: the option of the row; left out, the rest attaches.
        other: the other, where it is an option, and what the two need.
    """

    option: dict[str, Any]
    other: dict[str, Any]
    model: Callable[[], Any] = linear
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1)
    disabled: bool = False


BACKWARD = {"schedule": "backward"}
EXACT, TWO_PASS = {"clip": ClipNorm(1.0)}, {"clip": ClipNorm(1.0, mode="two_pass")}
SCALER = {"scaler": GradScaler("cpu")}
HOOK = {"comm_hook": (None, hook)}
CAST = {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
REDUCED = {"mixed_precision": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
SHARDS = {"shard_state": True}
KEYED = {"random": "keyed", "seed": 1}
PIPELINE = {"pipeline": "of the model"}
Adafactor = torch.optim.Adafactor  # its update is not elementwise

CASES = {
    "DEFER_IN_HOOKS": Case({"defer": True}, {"undo": True, **BACKWARD}),
    "SKIP_WITH_BACKWARD": Case({"nonfinite": "skip"}, BACKWARD),
    "SKIP_WITH_CLIP_THAT_RAISES": Case({"nonfinite": "skip"}, {"clip": ClipNorm(1.0, error_if_nonfinite=True)}),
    "UNDO_WITH_FORWARD": Case({"undo": "host"}, {"schedule": "forward"}),
    "MODE_WITH_FORWARD": Case(TWO_PASS, {"schedule": "forward"}),
    "EXACT_WITH_BACKWARD": Case(EXACT, BACKWARD),
    "MODE_WITH_UNDO": Case(TWO_PASS, {"undo": True, **BACKWARD}),
    "SCALER_WITH_BACKWARD": Case(SCALER, BACKWARD),
    "OFFLOAD_WITH_SHARD_STATE": Case({"offload": "host"}, SHARDS, ddp),
    "PIPELINE_WITH_ACCUMULATION_STEPS": Case({"accumulation_steps": 2}, PIPELINE, one_stage),
    "PIPELINE_WITH_TWO_PASS": Case(TWO_PASS, {**PIPELINE, **BACKWARD}, one_stage),
    "PIPELINE_WITH_COMMUNICATION": Case(SHARDS, PIPELINE, ddp),
    "PIPELINE_WITH_FSDP1": Case(PIPELINE, {}, sharded_flat),
    "MIXED_PRECISION_WITH_SEVERAL_MODELS": Case(CAST, {}, several),
    "RANDOM_WITH_FSDP1": Case(KEYED, {}, sharded_flat, OwnSGD),
    "BUCKET_BYTES_WITH_FSDP": Case({"bucket_bytes": 2**20}, {}, sharded),
    "MIXED_PRECISION_WITH_FSDP": Case(CAST, {}, sharded_flat),
    "CLIP_NORM_WITH_FSDP1": Case(EXACT, {}, sharded_flat),
    "TWO_PASS_WITH_FULLY_SHARD": Case(TWO_PASS, BACKWARD, sharded),
    "BUCKET_BYTES_WITH_DDP": Case({"bucket_bytes": 2**20}, {}, ddp),
    "COMM_HOOK_WITH_REPLICATE": Case(HOOK, {}, replicated),
    "COMM_HOOK_WITHOUT_DDP": Case(HOOK, {}),
    "PARAM_DTYPE_WITH_SPARSE_GRADIENTS": Case(CAST, {}, sparse),
    "REDUCE_DTYPE_ON_ONE_DEVICE": Case(REDUCED, {}),
    "REDUCE_DTYPE_WITH_COMM_HOOK": Case(REDUCED, HOOK, ddp),
    "SHARD_STATE_WITHOUT_DDP": Case(SHARDS, {}),
    "CLIP_VALUE_WITH_SHARDS_OF_WHOLE_PARAMETERS": Case(
        {"clip": ClipValue(1.0)}, {**SHARDS, **BACKWARD}, ddp, Adafactor
    ),
    "UNDO_WITH_SHARD_STATE": Case({"undo": True}, {**SHARDS, **BACKWARD}, ddp),
    "TWO_PASS_WITH_SHARD_STATE": Case(TWO_PASS, {**SHARDS, **BACKWARD}, ddp),
    "COMM_HOOK_WITH_SHARD_STATE": Case(HOOK, SHARDS, ddp),
    "OFFLOAD_ON_CPU": Case({"offload": "host"}, {}),
    "TWO_PASS_WITH_PARAMETERS_OUTSIDE": Case(TWO_PASS, BACKWARD, ddp_in_part),
    "COMM_HOOK_WITH_DISABLE": Case(HOOK, {}, disabled=True),
    "MIXED_PRECISION_WITH_DISABLE": Case(CAST, {}, disabled=True),
    "RANDOM_WITH_DISABLE": Case(KEYED, {}, optimizer=OwnSGD, disabled=True),
}
ON_ONE_DEVICE = (linear, sparse, several)


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group that has no other rank: as much as the wrappers need to be made and attached."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hooks_of(modules: list[nn.Module], optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that ``attach`` would register, and with what: equal lists, if nothing was."""
    found: list[Any] = [list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks)]
    for module in (inner for outer in modules for inner in outer.modules()):
        found.append([list(module._forward_pre_hooks), list(module._forward_hooks)])
        for parameter in module.parameters(recurse=False):
            found.append([parameter._backward_hooks, parameter._post_accumulate_grad_hooks, type(parameter)])
    return found


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_pair_is_refused_and_one_of_the_two_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if case.disabled:
        monkeypatch.setenv("INSTEP_DISABLE", "1")
    if case.model in ON_ONE_DEVICE:
        refused_and_taken(name, case)
        return
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with one_rank():
        refused_and_taken(name, case)


def with_schedule(given: dict[str, Any], model: Any) -> dict[str, Any]:
    return {**given, "pipeline": schedule_of(model)} if "pipeline" in given else given


def refused_and_taken(name: str, case: Case) -> None:
    model = case.model()
    modules = model if isinstance(model, list) else [model]
    optimizer = case.optimizer([p for module in modules for p in module.parameters()])
    before = hooks_of(modules, optimizer)
    option, other = with_schedule(case.option, model), with_schedule(case.other, model)
    with pytest.raises(AttachError) as raised:
        instep.attach(model, optimizer, **option, **other)
    assert raised.traceback[-1].locals["self"] is PAIRS[name], raised.value
    assert hooks_of(modules, optimizer) == before
    assert all(instep.attached(module) is None for module in modules)
    instep.attach(model, optimizer, **other).detach()


def test_each_row_has_a_case_and_a_place_among_the_rules() -> None:
    asked = [*rules.OPTIONS, *rules.MODEL, *rules.PARAMETERS, *rules.DISABLED]
    assert list(CASES) == list(PAIRS)
    for name, row in PAIRS.items():
        assert asked.count(row) == 1, name


def test_no_row_refuses_the_default() -> None:
    model = linear()
    target = Target([model], [torch.optim.SGD(model.parameters())], {})
    assert not [name for name, row in PAIRS.items() if row.option.holds(target, Options())]


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, rendered()), "make it anew: python -m tests.pairs"
