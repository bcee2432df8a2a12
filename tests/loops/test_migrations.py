"""The recipes of ``docs/migration.md``: both sides of each, bit for bit."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_optimizer import APOLLO, GaLore
from torch import nn
from transformers import get_scheduler
from transformers.optimization import Adafactor

import instep
from instep import ClipNorm
from instep_tools.harness import first_difference, training_state
from tests.integrations.hugging_face import tiny
from tests.loops.compare import require_same
from tests.loops.form import Run
from tests.loops.forms.frameworks import hugging_face
from tests.loops.line import LINE
from tests.loops.parts import Text, next_token_loss, tokens

SETTINGS: dict[str, Any] = {"max_steps": 6, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def low_rank(kind: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """``kind`` with a projection for the matrices of the blocks alone."""
    matrices = [p for name, p in model.named_parameters() if ".h." in name and p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
    assert matrices
    projected = {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "projection_type": "std"}
    return kind([{"params": matrices, **projected}, {"params": rest}], lr=1e-2)


# pytorch_optimizer's APOLLO draws its projections from torch's own generator: its steps are left whole.
SMALL = 16_000  # bytes: several buckets
WAYS: dict[str, tuple[float, dict[str, Any]]] = {
    "the line": (0.5, LINE),
    "freed": (0.0, {"schedule": "backward", "bucket_bytes": SMALL}),
    "freed, clipped": (0.5, {"schedule": "backward", "bucket_bytes": SMALL, "clip": ClipNorm(0.5, mode="two_pass")}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [GaLore, APOLLO])
def test_low_rank_optimizers_in_the_trainer(kind: Callable[..., torch.optim.Optimizer], way: str) -> None:
    limit, options = WAYS[way]
    runs = []
    for one in (None, options):
        run = Run(one, every_step=True)
        model = tiny()
        optimizer = low_rank(kind, model)
        schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=6)
        torch.manual_seed(0)
        hugging_face(run, (optimizer, schedule), model, max_grad_norm=limit, **SETTINGS)
        runs.append(run.steps)
    require_same(*runs)
    norms = [norm for step in runs[0] if (norm := step.get("logged['logs']['grad_norm']")) is not None]
    assert len(norms) == 6
    assert min(norms) > limit  # the Trainer clips, where it is told to


def step_param(optimizer: Adafactor, p: torch.Tensor, group: dict[str, Any]) -> None:
    """What the trainers patch into Adafactor: the update of one parameter."""
    one = copy.copy(optimizer)
    one.param_groups = [{**group, "params": [p]}]
    Adafactor.step(one)


def fused(optimizer: Adafactor, group: dict[str, Any], limit: float, p: torch.Tensor) -> None:
    """The trainers' hook of one parameter."""
    if limit:
        nn.utils.clip_grad_norm_(p, limit)
    step_param(optimizer, p, group)
    p.grad = None


def adafactor(dtype: torch.dtype, **settings: Any) -> tuple[Text, Any]:
    torch.manual_seed(0)
    model = Text(tied=False).to(dtype)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    chosen = {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "warmup_init": False, **settings}
    return model, Adafactor([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], **chosen)


def trained(model: Text, optimizer: Any, step: Callable[[], None]) -> Iterator[list[tuple[str, Any]]]:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
    for x, y in tokens(6):
        next_token_loss(model(x).float(), y).backward()
        step()
        schedule.step()
        state = training_state(model, optimizer)
        yield [(name, value.clone() if isinstance(value, torch.Tensor) else value) for name, value in state]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before:UserWarning")  # the hooks step
@pytest.mark.parametrize(
    ("dtype", "limit", "settings"),
    [
        pytest.param(torch.float32, 0.02, {}, id="clipped"),
        pytest.param(torch.float32, 0.0, {}, id="not clipped"),
        pytest.param(torch.bfloat16, 0.02, {}, id="bfloat16"),
        pytest.param(torch.float32, 0.02, {"scale_parameter": True, "beta1": 0.9}, id="momentum"),
    ],
)
def test_the_hook_of_adafactor(dtype: torch.dtype, limit: float, settings: dict[str, Any]) -> None:
    model, optimizer = adafactor(dtype, **settings)
    norms = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
            p.register_post_accumulate_grad_hook(partial(fused, optimizer, group, limit))
    hooks = list(trained(model, optimizer, lambda: None))
    assert limit == 0 or min(norms) < limit < max(norms)  # some are clipped, and some are not

    model, optimizer = adafactor(dtype, **settings)
    if limit:  # before attach: a hook that comes earlier is called earlier

        def clip(p: torch.Tensor) -> None:  # a hook may return nothing else
            nn.utils.clip_grad_norm_(p, limit)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clip)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with instep.attach(model, optimizer, schedule="backward", bucket_bytes=1) as overlap:
        assert len(overlap.plan.buckets) == len(list(model.parameters()))
        attached = list(trained(model, optimizer, step))
    for number, (a, b) in enumerate(zip(hooks, attached, strict=True)):
        difference = first_difference(iter(a), iter(b))
        assert difference is None, f"step {number}: {difference}"
