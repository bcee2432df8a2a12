"""``verify``: the plain loop beside the attached one, on the user's own model, bit for bit after every step."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep import attach
from instep.errors import AttachError
from instep_tools.harness import lockstep, reshard, same, training_state

_logger = logging.getLogger("instep")

Build = Callable[[], tuple[nn.Module, Optimizer | Sequence[Optimizer], Callable[[int], object]]]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``.

    Attributes:
        steps: how many steps were compared.
        tensors: how many tensors were compared after the last of them.
        difference: the first difference, with the tensor's name; ``None`` if there is none.
        trained: whether the plain loop has changed any parameter. If not, there was nothing to compare: a warning says
            so.

    Since 0.1.0.

    Example:
        ```python
        def build():
            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            return model, optimizer, lambda i: (model(loader[i]).backward(), optimizer.step(), optimizer.zero_grad())

        result = instep.verify(build, schedule="backward")
        assert result.equal, result.difference
        ```
    """

    steps: int
    tensors: int
    difference: str | None
    trained: bool = True

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return self.difference is None


def verify(build: Build, steps: int = 3, **options: Any) -> Verification:
    """Train twice, plain and attached, and compare all parameters, buffers and optimizer state after every step.

    Args:
        build: returns ``(model, optimizer, step)``, where ``step(i)`` runs the i-th iteration of the loop: forward,
            backward, ``optimizer.step()``, and what else belongs to it. It is called twice with the same random
            seed, and so is each step, so both loops see the same weights, dropout and shuffling.
        steps: how many iterations to compare.
        options: passed on to ``instep.attach``. Not ``clip``, ``comm_hook``, ``mixed_precision`` and ``random``, which
            change the numbers themselves. With ``schedule="forward"`` or ``undo`` the loop may clip in ``step(i)``.

    Raises:
        AttachError: ``build`` or what it returns is something else, and what ``attach`` raises.

    Since 0.1.0.

    Example:
        ```python
        def build():
            model = Model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

            def step(i):
                model(loader[i]).backward()
                optimizer.step()
                optimizer.zero_grad()

            return model, optimizer, step

        print(instep.verify(build, steps=3, schedule="backward"))
        ```
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise AttachError(f"steps must be a whole number, at least 1, not {steps!r}")
    if not callable(build) or isinstance(build, (nn.Module, type)):
        raise AttachError(f"build must be a function that returns (model, optimizer, step), not {build!r}")
    for name in ("clip", "comm_hook", "mixed_precision", "random"):
        if options.get(name) is not None:
            raise AttachError(
                f"{name} changes the numbers themselves, so the loop without it is no oracle. Verify without {name}"
            )
    # The user's own random state is as before afterwards, and both loops draw the same numbers in every step.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, plain_optimizer, plain_step = _built(build)
        torch.manual_seed(0)
        model, optimizer, step = _built(build)
        _require_two(plain, model, plain_optimizer, optimizer)
        unchanged = {name: p.detach().clone() for name, p in plain.named_parameters() if not is_lazy(p)}
        trained = len(unchanged) < len(list(plain.parameters()))  # a lazy one has got its values by the end
        with attach(model, optimizer, **options) as overlap:

            def states() -> Any:
                return training_state(plain, plain_optimizer), training_state(model, optimizer)

            for number, difference in enumerate(lockstep((plain_step, step), states, steps, overlap), 1):
                if difference is not None:
                    return Verification(number, 0, difference, trained)
                trained = trained or _has_changed(plain, unchanged)
                if trained:
                    unchanged.clear()  # a copy of the model
            tensors = sum(isinstance(value, torch.Tensor) for _, value in training_state(model, optimizer))
        if not trained:
            _logger.warning(
                "verify: step(i) has changed no parameter in %d steps, so that nothing was compared. Does it call "
                "backward() and optimizer.step() of what build has returned, with a learning rate above 0?",
                steps,
            )
        return Verification(steps, tensors, None, trained)


def _has_changed(model: nn.Module, before: Mapping[str, torch.Tensor]) -> bool:
    reshard(model)
    return any(name not in before or not same(p.detach(), before[name]) for name, p in model.named_parameters())


def _built(build: Build) -> tuple[nn.Module, list[Optimizer], Callable[[int], object]]:
    made: Any = build()
    if not (isinstance(made, tuple) and len(made) == 3 and callable(made[2])):
        raise AttachError(f"build must return (model, optimizer, step), with a function step(i); it returned {made!r}")
    optimizers = [made[1]] if isinstance(made[1], Optimizer) or not isinstance(made[1], (list, tuple)) else [*made[1]]
    if not isinstance(made[0], nn.Module):
        raise AttachError(f"build must return (model, optimizer, step), with a torch.nn.Module; it returned {made!r}")
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise AttachError(
                "build must return (model, optimizer, step), with a torch.optim.Optimizer or a list of them; it "
                f"returned {made!r}"
            )
    return made[0], optimizers, made[2]


def _require_two(
    plain: nn.Module, model: nn.Module, plain_optimizers: Sequence[Optimizer], optimizers: Sequence[Optimizer]
) -> None:
    shared = {id(p) for p in plain.parameters()} & {id(p) for p in model.parameters()}
    if shared:
        name = next(name for name, p in model.named_parameters() if id(p) in shared)
        raise AttachError(
            f"build returned parameter {name!r} twice, so that the plain loop and the attached one would train the "
            "same weights. Make a new model in build, and a new optimizer"
        )
    if set(map(id, plain_optimizers)) & set(map(id, optimizers)):
        raise AttachError("build returned the same optimizer twice. Make a new model in build, and a new optimizer")
