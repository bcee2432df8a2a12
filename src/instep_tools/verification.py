"""``verify``: the plain loop beside the attached one, on the user's own model, compared bit for bit after every step.

``training_state`` names every value that a step changes, and ``first_difference`` compares two such states.
"""

import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from instep._arguments import optimizers_of, require_count, require_model
from instep._optim.values import is_wrapper, same_numbers
from instep.attaching import attach
from instep.errors import AttachError
from instep.sources.fsdp.modules import put_shards_in_place

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
    require_count("steps", steps, AttachError)
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
            for i in range(steps):
                torch.manual_seed(i)
                plain_step(i)
                torch.manual_seed(i)
                step(i)
                overlap.synchronize()  # an update that was put off is to be compared, too
                difference = first_difference(training_state(plain, plain_optimizer), training_state(model, optimizer))
                if difference is not None:
                    return Verification(i + 1, 0, f"after step {i + 1}: {difference}", trained)
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
    put_shards_in_place(model)
    return any(name not in before or not same_numbers(p.detach(), before[name]) for name, p in model.named_parameters())


def _built(build: Build) -> tuple[nn.Module, list[Optimizer], Callable[[int], object]]:
    made: Any = build()
    if not (isinstance(made, tuple) and len(made) == 3 and callable(made[2])):
        raise AttachError(f"build must return (model, optimizer, step), with a function step(i); it returned {made!r}")
    return require_model(made[0], AttachError), optimizers_of(made[1], AttachError), made[2]


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


def training_state(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Everything that a step changes, each with a name: parameters, buffers, optimizer state and the values of groups.

    Parameters keep their names, and state is named after its parameter.
    """
    names: dict[int, str] = {}
    put_shards_in_place(model)  # a step that ends with an evaluation leaves gathered ones there, without a state
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield f"parameter {name!r}", parameter.detach()
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", buffer
    for number, one in enumerate([optimizer] if isinstance(optimizer, Optimizer) else optimizer):
        kind = f"{type(one).__name__} {number}" if number else type(one).__name__
        for key, value in one.state.items():
            yield from _leaves(f"{kind}.state of {names.get(id(key), key)!r}", value)
        for index, group in enumerate(one.param_groups):
            for option, value in group.items():
                if option != "params":
                    yield from _leaves(f"{kind}.param_groups[{index}][{option!r}]", value)


def first_difference(plain: Iterator[tuple[str, Any]], other: Iterator[tuple[str, Any]]) -> str | None:
    """Compare two results of ``training_state`` bit for bit. Returns the first difference in words, or ``None``."""
    left, right = dict(plain), dict(other)
    for name in left.keys() ^ right.keys():
        return f"only the {'plain' if name in left else 'attached'} loop has {name}"
    for name, a in left.items():
        b = right[name]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{name} is {a.dtype} {tuple(a.shape)}, attached {b.dtype} {tuple(b.shape)}"
            if a.device != b.device:
                a, b = a.cpu(), b.cpu()  # state of offload="host"
            if not same_numbers(a, b):
                return f"{name} differs{_gap(a, b)}"
        elif type(a) is not type(b) or not _same_value(a, b):
            return f"{name} is {a!r}, attached {b!r}"
    return None


def _gap(a: torch.Tensor, b: torch.Tensor) -> str:
    if is_wrapper(a) or a.is_nested:
        return ""  # its class may not know how to subtract
    gap = (a.detach().to_dense().double() - b.detach().to_dense().double()).abs().max().item()
    return f" by up to {gap:.3g}"


def _same_value(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors are equal, by ``==``, by what they pickle to, or by their attributes."""
    try:
        if a == b:
            return True
    except (ValueError, RuntimeError):
        pass  # of an array, and of an object that holds a tensor, torch and NumPy have no single answer
    try:
        # NaN equals NaN here too. So do two objects of equal content whose class has no ``==`` of its own.
        if pickle.dumps(a) == pickle.dumps(b):
            return True
    except Exception:  # its class decides how, and whether, an object is pickled
        pass
    # Equal tensors need not be pickled alike. An object without attributes does not show what it holds.
    mine, theirs = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
    try:
        return bool(mine) and first_difference(_leaves("", mine), _leaves("", theirs)) is None
    except RecursionError:
        return False


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values in nested containers, each with its path behind ``name``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield from _leaves(f"{name}[{i}]", item)
    else:
        yield name, value
