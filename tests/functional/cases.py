"""One body for every row and column of the parity table: a plain loop beside one whose backward steps."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import instep
from tests.cases import Blocks, Rotations, Sometimes, SparseWords, Tied, batch, channels_last, optimizer_cases
from tests.devices import here

OPTIMIZERS = {name: (cls, kwargs) for name, cls, kwargs in optimizer_cases()}
OPTIMIZERS["sparse SGD"] = (torch.optim.SGD, {"lr": 0.05})
SOME = ["SGD-1-for-loop", "AdamW-0-foreach", "AdamW-0-fused", "Adagrad-0-for-loop"]
FSDP_CASES = [
    ("AdamW-0-fused", False),
    ("AdamW-0-fused", True),
    # Sharded over gloo each takes seconds.
    *(pytest.param(name, False, marks=pytest.mark.nightly) for name in SOME if name != "AdamW-0-fused"),
]
"""An optimizer, and whether in bfloat16."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Blocks": Blocks,
    "Tied": Tied,
    "Sometimes": Sometimes,
    "Rotations": Rotations,
    "SparseWords": SparseWords,
    "channels_last": channels_last,
}


def loss(model: nn.Module, kind: str, seed: int) -> torch.Tensor:
    first = next(model.parameters())
    if kind in ("Tied", "SparseWords"):
        tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(seed), device="cpu").to(
            first.device
        )
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    x, y = (t.to(first.device) for t in batch(seed))
    x = x.to(torch.bfloat16 if first.dtype == torch.bfloat16 else torch.float32)
    x = x.view(-1, 1, 4, 4) if kind == "channels_last" else x
    # In some steps the ranks pick different experts, in others none does.
    expert = None if seed % 3 == 0 else (seed + seed // 1000) % 2
    out = model(x, expert) if kind == "Sometimes" else model(x)
    return nn.functional.cross_entropy(out.float(), y)


def make(kind: str, wrapper: str) -> nn.Module:
    """On the rank's device. Sharded over gloo on CPU everywhere: it does not reduce-scatter on GPUs."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    return model.to(here()) if wrapper == "ddp" else model


def wrap(model: Any, wrapper: str, low: bool = False, **options: Any) -> nn.Module:
    """``low``: bfloat16 computation and reduction by the wrapper's own policy."""
    if wrapper == "ddp":
        return DistributedDataParallel(model, **{"bucket_cap_mb": 0.002, **options})
    if wrapper == "fsdp1":
        policy = MixedPrecision(torch.bfloat16, torch.bfloat16) if low else None
        inner = [FullyShardedDataParallel] if isinstance(model, Blocks) else []
        for name in ("inner", "outer") if inner else ():
            child = getattr(model, name)
            setattr(model, name, _fsdp1(child, policy, **options))
        return _fsdp1(model, policy, **options)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        kwargs = {"mesh": mesh, **options}
        if low:
            kwargs["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for block in getattr(model, "blocks", ()):
            fully_shard(block, **kwargs)
        return fully_shard(model, **kwargs)
    return model


def _fsdp1(module: nn.Module, policy: MixedPrecision | None, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=here(), mixed_precision=policy, **options)


def holding(model: nn.Module, wrapper: str, last: bool) -> contextlib.AbstractContextManager[Any]:
    """All but the last micro-batch: the wrapper's own way of adding gradients up."""
    if wrapper == "fsdp2":
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    if wrapper in ("ddp", "fsdp1") and not last:
        return model.no_sync()  # type: ignore[operator]
    return contextlib.nullcontext()


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Their values on this rank: of a sharded parameter, its shard."""
    return {n: p.to_local() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def state_of(optimizers: list[torch.optim.Optimizer]) -> dict[tuple[int, str], Any]:
    return {(id(p), key): value for o in optimizers for p, entry in o.state.items() for key, value in entry.items()}


def difference(
    plain: nn.Module, optimizer: torch.optim.Optimizer, model: nn.Module, mine: list[torch.optim.Optimizer]
) -> str | None:
    ours = parameters_of(model)
    for name, value in parameters_of(plain).items():
        if not torch.equal(value, ours[name]):
            return f"{name} differs by up to {(value - ours[name]).abs().max().item():.3g}"
    theirs, own = state_of([optimizer]), state_of(mine)
    pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
    for (name, p), q in pairs:
        keys = [key for owner, key in theirs if owner == id(p)]
        if sorted(keys) != sorted(key for owner, key in own if owner == id(q)):
            return f"state of {name}: {keys}"
        for key in keys:
            a, b = theirs[id(p), key], own[id(q), key]
            a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
            # A hook of backward finds no default device: older torch has "step" on the CPU then, as its own function.
            if not (torch.equal(a, b.to(a.device)) if isinstance(a, torch.Tensor) else a == b):
                return f"{key} of {name} differs"
    return None


def in_backward_parity(
    wrapper: str,
    optimizer: str,
    kind: str = "Blocks",
    *,
    before: bool,
    steps: int = 4,
    micro_batches: int = 1,
    low: bool = False,
    dtype: torch.dtype | None = None,
    late: bool = False,
    options: dict[str, Any] | None = None,
) -> str | None:
    """``apply_optimizer_in_backward``, called before or after wrapping; ``late``: after a first plain step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    cls, kwargs = OPTIMIZERS[optimizer]
    made = make(kind, wrapper)
    if dtype is not None:
        made = made.to(dtype)
    plain = wrap(copy.deepcopy(made), wrapper, low, **(options or {}))
    opt = cls(plain.parameters(), **kwargs)
    if before:
        instep.apply_optimizer_in_backward(cls, made.parameters(), kwargs)
    model = wrap(made, wrapper, low, **(options or {}))
    if not before and not late:
        instep.apply_optimizer_in_backward(cls, model.parameters(), kwargs)
    for i in range(steps):
        for m in (plain, model):
            for micro in range(micro_batches):
                with holding(m, wrapper, micro == micro_batches - 1):
                    loss(m, kind, 1000 * rank + micro_batches * i + micro).backward()
        if late and i == 0:
            # The first backward was plain in both, and its gradients are dropped in both.
            opt.zero_grad()
            model.zero_grad()
            instep.apply_optimizer_in_backward(cls, model.parameters(), kwargs)
            continue
        opt.step()
        opt.zero_grad()
        if any(p.grad is not None for p in model.parameters()):
            return f"after step {i + 1}: a gradient was left"
        found = difference(plain, opt, model, instep.get_in_backward_optimizers(model))
        if found is not None:
            return f"after step {i + 1}: {found}"
    return None


class Functional:
    """A functional optimizer of one's own: any ``torch.optim`` class, one object for each parameter."""

    def __init__(self, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> None:
        self.cls, self.kwargs = cls, kwargs
        self.optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {}

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        own = self.optimizers.setdefault(param, self.cls([param], **self.kwargs))
        as_left, param.grad = param.grad, grad
        own.step()
        param.grad = as_left


def hook_parity(
    make_hook: Callable[[nn.Module, Any], tuple[Any, Any]],
    plain_hook: tuple[Any, Any] | None,
    optimizer: str,
    kind: str = "Blocks",
    *,
    steps: int = 4,
    micro_batches: int = 1,
    subset: bool = False,
    join: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> str | None:
    """A hook of ``make_hook(ddp, functional)`` beside plain DDP with ``plain_hook`` and the plain optimizer.

    ``join``: options of ``DDP.join``; each rank then has another number of inputs.
    """
    rank = dist.get_rank()
    cls, kwargs = OPTIMIZERS[optimizer]
    made = make(kind, "ddp")
    plain: Any
    model: Any
    plain, model = (wrap(copy.deepcopy(made), "ddp", **(options or {})) for _ in range(2))
    trained = [p for i, p in enumerate(plain.parameters()) if not subset or i % 2]
    opt = cls(trained, **kwargs)
    if plain_hook is not None:
        plain.register_comm_hook(*plain_hook)
    functional = Functional(cls, kwargs)
    chosen = [p for i, p in enumerate(model.parameters()) if i % 2] if subset else None
    model.register_comm_hook(*make_hook(model, (functional, chosen)))

    def run(m: nn.Module, i: int) -> None:
        for micro in range(micro_batches):
            with holding(m, "ddp", micro == micro_batches - 1):
                loss(m, kind, 1000 * rank + micro_batches * i + micro).backward()
        if m is plain:
            opt.step()
            opt.zero_grad()
        for i, p in enumerate(m.parameters()):
            if subset and not i % 2:
                p.grad = None  # nobody steps it, so somebody has to clear it

    if join is not None:
        for m in (plain, model):
            with m.join(**join):
                for i in range(steps - rank):
                    run(m, i)
        return difference(plain, opt, model, list(functional.optimizers.values()) + in_backward(model))
    for i in range(steps):
        for m in (plain, model):
            run(m, i)
        if any(p.grad is not None for p in model.parameters()):
            return f"after step {i + 1}: a gradient was left"
        mine = list(functional.optimizers.values()) + in_backward(model)
        if (found := difference(plain, opt, model, mine)) is not None:
            return f"after step {i + 1}: {found}"
    return None


def in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    return instep.get_in_backward_optimizers(model)


def overlapped_parity(
    wrapper: str,
    optimizer: str,
    kind: str = "Blocks",
    *,
    all_parameters: bool = True,
    steps: int = 4,
    micro_batches: int = 1,
    low: bool = False,
    options: dict[str, Any] | None = None,
) -> str | None:
    """``as_overlapped_optim`` with an LR scheduler and step hooks, its state saved and loaded halfway."""
    rank = dist.get_rank()
    cls, kwargs = OPTIMIZERS[optimizer]
    made = make(kind, wrapper)
    plain, model = (wrap(copy.deepcopy(made), wrapper, low, **(options or {})) for _ in range(2))
    opt = cls(plain.parameters(), **kwargs)
    overlapped: Any = instep.as_overlapped_optim(cls, None if all_parameters else model.parameters(), **kwargs)
    (overlapped.register_ddp if wrapper == "ddp" else overlapped.register_fsdp)(model)
    pair = (opt, overlapped.optimizer)
    fired: list[list[int]] = [[], []]
    for one, calls in zip(pair, fired, strict=True):
        one.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda epoch: 1 / (1 + epoch)) for one in pair]
    for i in range(steps):
        for m in (plain, model):
            for micro in range(micro_batches):
                with holding(m, wrapper, micro == micro_batches - 1):
                    loss(m, kind, 1000 * rank + micro_batches * i + micro).backward()
        opt.step()
        opt.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if any(p.grad is not None for p in model.parameters()):
            return f"after step {i + 1}: a gradient was left"
        if overlapped.param_groups[0]["lr"] != opt.param_groups[0]["lr"]:
            return f"after step {i + 1}: lr"
        if fired[0] != fired[1]:
            return f"after step {i + 1}: step hooks ran {len(fired[1])} times"
        if (found := difference(plain, opt, model, [overlapped.optimizer])) is not None:
            return f"after step {i + 1}: {found}"
        if i == 1:
            for one in (opt, overlapped):
                one.load_state_dict(copy.deepcopy(one.state_dict()))
    attachment = instep.attached(model)
    assert attachment is not None
    assert attachment.step_count == steps
    attachment.detach()
    return None
