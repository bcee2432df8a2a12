"""The training program: models, optimizers and data, the same in every process that takes part."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from instep import ClipNorm
from tests.cases import Blocks, Sometimes, Tied, batch
from tests.devices import bytes_of
from tests.distributed.sharded import two_d
from tests.faults.cases import DIFFERS, STAGED_SGD, TIMEOUT, Case


class Staged(torch.optim.Optimizer):
    """Momentum that writes the state of a parameter, calls ``between``, and then writes the parameter."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad)
                Staged.between()
                p.add_(state["momentum"], alpha=-group["lr"])


def staged_sgd(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momenta: list[Any],
    *_: Any,
    lr: float,
    momentum: float,
    **__: Any,
) -> None:
    """torch's own SGD with momentum, in the same stages: an update that waits for a later forward is torch's own."""
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if momenta[number] is None:
            momenta[number] = gradient.clone()
        else:
            momenta[number].mul_(momentum).add_(gradient)
        Staged.between()
        parameter.add_(momenta[number], alpha=-lr)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=False),
    "Staged": Staged,
    STAGED_SGD: lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False),
}


class Chain(nn.Sequential):
    """Layers one after the other, without biases: a bucket each."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 16, bias=False) for _ in range(6)), nn.Linear(16, 10))


class Recurrent(nn.Module):
    """One layer used in every turn: its gradient is final only at the last."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(16, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(self.turn(x))
        return self.out(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Blocks": Blocks,
    "Chain": Chain,
    "Recurrent": Recurrent,
    "Sometimes": Sometimes,
    "Tied": Tied,
}
BUCKET_MB = 0.004
"""Small enough for several buckets."""


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[case.model]().to(case.device)
    if case.source in ("ddp", "zero", "joined"):
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    elif case.source == "fsdp2":
        for block in model.blocks if isinstance(model, Blocks) else model.children():
            fully_shard(block)
        fully_shard(model)
    elif case.source == "2d":
        model = two_d(model)
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        for group in {group for mesh in meshes for group in mesh.get_all_groups()}:
            # torch gives the groups of a mesh half an hour, whatever the default group has.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), group)
    return model, OPTIMIZERS[case.optimizer](model.parameters())


def before_the_faults(model: Any, optimizer: torch.optim.Optimizer, case: Case, rank: int) -> None:
    """What a run does before its steps are counted."""
    if case.source == "joined":
        with model.join():
            for step in range(1 + rank):
                loss_of(model, case, rank, 100 + step).backward()
                optimizer.step()
                optimizer.zero_grad()


DIFFERING: tuple[dict[str, Any], ...] = (
    {"clip": ClipNorm(0.01)},
    {"nonfinite": "raise"},
    {"random": "keyed", "seed": 1},
    {"schedule": "forward", "defer": False, "undo": False},
    {"disabled": True},
)
"""What another rank may be given beside, or in place of, the options of a case: ``where`` says which."""


def options(case: Case, rank: int) -> dict[str, Any]:
    """What ``instep.attach`` is given."""
    chosen = _options(case)
    return chosen | DIFFERING[case.where] if case.kind == DIFFERS and rank in case.ranks else chosen


def _options(case: Case) -> dict[str, Any]:
    if case.way == "default":
        return {} if case.nonfinite is None else {"nonfinite": case.nonfinite}
    chosen: dict[str, Any] = {"schedule": "backward", "undo": case.way == "undo"}
    if case.way == "forward":
        chosen = {"schedule": "forward", "defer": True}
    if case.way == "beside":
        chosen["defer"] = True
    if case.source == "local":
        chosen["bucket_bytes"] = int(BUCKET_MB * 2**20)
    if case.source == "zero":
        chosen.pop("undo", None)
        chosen["shard_state"] = True
    if case.nonfinite is not None:
        chosen["nonfinite"] = case.nonfinite
    return chosen


def with_torchs_own_overlap(model: nn.Module) -> object:
    """torch's own step in backward, of plain SGD as above. Returns what must be kept."""
    # Imported here: they warn of scripted functions.
    from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim
    from torch.distributed.optim import _apply_optimizer_in_backward

    if isinstance(model, DistributedDataParallel):
        overlapped = _as_overlapped_optim(torch.optim.SGD, None, lr=0.05)
        overlapped.register_ddp(model)
        return overlapped
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05, "foreach": False})
    return None


def loss_of(model: nn.Module, case: Case, rank: int, step: int) -> torch.Tensor:
    seed = 1000 * (0 if case.source == "2d" else rank) + step  # tensor parallelism wants the same data on all ranks
    if case.model == "Tied":
        tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(seed)).to(case.device)
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    x, y = (tensor.to(case.device) for tensor in batch(seed))
    out = model(x, (None, 0, 1)[seed % 3]) if case.model == "Sometimes" else model(x)
    return nn.functional.cross_entropy(out, y)


def fingerprint(optimizer: torch.optim.Optimizer, rows_of: tuple[int, int] | None = None) -> tuple[str, str]:
    """SHA-256 of the parameters and of the optimizer's state as they are in memory. instep is not told of this.

    Args:
        rows_of: a rank and the number of ranks: of the state only what this rank has of it with ``shard_state``.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with torch._C.DisableTorchFunctionSubclass():
        state = vars(optimizer)["state"]  # whose users are told
        states = [state.get(p, {}) for p in parameters]
        if rows_of is not None:
            states = rows_of_states(states, parameters, *rows_of)
    return digest(parameters), digest_of_states(states)


def rows_of_states(
    states: Sequence[dict[str, Any]], parameters: Sequence[torch.Tensor], rank: int, ranks: int
) -> list[dict[str, Any]]:
    """What ``rank`` keeps of them with ``shard_state``."""
    return [
        {key: _rows(value, parameter, rank, ranks) for key, value in one.items()}
        for one, parameter in zip(states, parameters, strict=True)
    ]


def _rows(value: Any, parameter: torch.Tensor, rank: int, ranks: int) -> Any:
    """As ``DTensor``'s ``Shard(0)`` divides them."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    size = -(-len(value) // ranks)
    return value[rank * size : (rank + 1) * size]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return _digest(tensors)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        # Read through DTensor's own slot: a parameter that is watched tells of other ways.
        local = DTensor._local_tensor.__get__(tensor) if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]
        found.update(str((tuple(local.shape), local.dtype)).encode())
        found.update(bytes_of(local.detach()))
    return found.hexdigest()[:16]


def digest_of_states(states: Iterable[dict[str, Any]]) -> str:
    found = hashlib.sha256()
    for state in states:
        for key in sorted(state):
            value = state[key]
            found.update(key.encode())
            found.update((digest([value]) if isinstance(value, torch.Tensor) else repr(value)).encode())
    return found.hexdigest()[:16]
