"""A few steps of the user's loop on fake tensors, without data, and what they would have taken."""

import ast
import importlib
import inspect
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from instep._optim.kinds import is_in_torch_optim
from instep._optim.stepper import Stepper
from instep._optim.undo import Undo, UndoCopies
from instep.attaching import attach
from instep.attachment import Attachment
from instep.planning.job import Job, PlanError

# What the user named: a function of theirs, an optimizer, its options.


def function_named(option: str, name: str) -> Callable[..., Any]:
    """The function ``module:function``; modules are looked for in the working directory, too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise PlanError(f"{option} {name}: name a function as module:function, as in mymodel:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PlanError(
            f"{option} {name}: there is no module {error.name!r} here or among the installed ones"
        ) from error
    except Exception as error:
        raise PlanError(f"{option} {name}: importing {module_name} raised {_said(error)}") from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise PlanError(f"{option} {name}: there is no {part!r} in {module_name}")
        found = getattr(found, part)
    if not callable(found):
        raise PlanError(f"{option} {name}: it is a {type(found).__name__}, and cannot be called")
    return found  # type: ignore[no-any-return]


def called(option: str, name: str, *args: Any) -> Any:
    """What the function returns; an error of its own becomes one line."""
    function = function_named(option, name)
    try:
        return function(*args)
    except Exception as error:
        raise PlanError(
            f"{option} {name} raised {_said(error)}. It is run without any data, on tensors that have shapes and no "
            "values: build from a configuration, not from files, and on no device"
        ) from error


def optimizer_named(name: str) -> Callable[..., torch.optim.Optimizer]:
    if ":" in name:
        return function_named("--optimizer", name)
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [
            one for one in dir(torch.optim) if one[0].isupper() and isinstance(getattr(torch.optim, one), type)
        ]  # a few more than optimizers, were there any
        raise PlanError(
            f"--optimizer {name}: torch.optim has none of that name. It has "
            f"{', '.join(one for one in known if one != 'Optimizer')}; others are named module:Class"
        )
    return found


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value`` as keywords. Values are Python's literals, or plain text."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise PlanError(f"--option {pair}: write it as name=value, as in lr=0.1")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
        except (RecursionError, MemoryError) as error:  # of Python's parser
            raise PlanError(f"--option {name}: its value is nested too deeply") from error
    return found


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# Tensors that have everything but values: programs run on them as they are, and take no memory.
#
# They are torch's fake tensors, the ones that ``torch.export`` and ``torch.compile`` run models on;
# ``torch._subclasses`` is where torch's own documentation imports them from.


_ITEM = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default


class _AnyValue(TorchDispatchMode):
    """Answers 1 where a program asks for the value of a tensor: optimizers do, for the number of their steps. Tensors
    that are compared are equal."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ITEM and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return _one(args[0].dtype)
        if func is _EQUAL and any(isinstance(arg, FakeTensor) for arg in args):
            return True
        return func(*args, **(kwargs or {}))


def _one(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1 + 0j if dtype.is_complex else 1


class _Copies(TorchFunctionMode):
    """Makes deep copies of tensors that have no memory to copy: torch's own way to do it crashes on them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


class FakeTensors:
    """Where programs run on fake tensors, without data. All tensors that meet must be of one ``FakeTensors``."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._mode, _AnyValue():
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The same, where tensors may be deep-copied."""
        with self(), _Copies():
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """Where what is to be put on it is made: on torch's meta device, which a model may be moved and cast on."""
        with torch.device("meta"), _AnyValue():
            yield

    def put_inputs(self, inputs: Any) -> Any:
        """The same, of tensors without data."""
        with self._mode:
            return tree_map_only(torch.Tensor, self._put, inputs)

    def put(self, model: nn.Module) -> None:
        """Make all parameters and buffers of ``model`` ones without data, on a device that computes; tied ones stay
        tied."""
        made: dict[int, Any] = {}
        with self._mode:
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None:
                            if id(tensor) not in made:
                                made[id(tensor)] = self._put(tensor)
                            tensors[name] = made[id(tensor)]

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
            return tensor
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake


# How many bytes of tensors there are, counted as they are made and freed.


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations on this thread make, backward's too; freed they may be by any thread.

    Args:
        there: tensors that were made before, and do not count.

    Attributes:
        now: bytes alive.
        peak: the most there were since ``reset``.
    """

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in there}

    def reset(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.layout is torch.strided:
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


# What a kernel takes while it runs: bytes that no tensor of the program shows.


_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def inside(func: Any, args: Sequence[Any], result: Any) -> int:
    """The most bytes beside arguments and results.

    A convolution on a CPU (oneDNN's, of more than one element) copies what it reads into a layout of its own, and what
    it has made out of it, as torch's allocator shows. Others are taken as if they needed nothing.
    """
    if func is _FORWARD and _copies(args[1]):
        return max(_bytes(args[0]) + _bytes(args[1]), _bytes(result))
    if func is _BACKWARD and _copies(args[2]):
        return max(_bytes(args[0]) + _bytes(args[1]), _bytes(args[2]))
    return 0


class LiveInside(LiveBytes):
    """Counts what kernels take, too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.now + inside(func, args, result))
        return result


def _copies(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and any(size > 1 for size in weight.shape[2:])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# The user's model, inputs, loss and optimizer, made of fake tensors.


IMPLEMENTATIONS = ("foreach", "fused")
FOR_LOOP = "for-loop"


class PlannedModel:
    """One model, ready to be trained without data.

    Attributes:
        fakes: where it runs.
        runs: whether there are inputs, so that its forward can run.
        sums_outputs: whether the last loss was the sum of what the model returned, for want of one.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.fakes = FakeTensors()
        self.sums_outputs = False
        with self.fakes.building():
            built = called("BUILD", job.build)
        self._inputs: Any = None
        if isinstance(built, tuple) and len(built) == 2:
            built, self._inputs = built[0], self.fakes.put_inputs(built[1])
        if not isinstance(built, nn.Module):
            raise PlanError(
                f"{job.build} returned a {type(built).__name__}: let it return a torch.nn.Module, or the model and its "
                "inputs as a pair"
            )
        for name, parameter in built.named_parameters():
            if is_lazy(parameter):
                raise PlanError(f"{job.build}: parameter {name!r} has no shape yet (lazy module)")
        self.model = built.train()
        self.fakes.put(self.model)
        if not any(p.requires_grad for p in self.model.parameters()):
            raise PlanError(f"{job.build}: the model has no parameter that is trained")
        self.runs = self._inputs is not None or job.inputs is not None
        if not self.runs:
            self.model.forward = self._gradients_alone

    def loss(self) -> torch.Tensor:
        """Of one forward, on inputs that are made for it."""
        if not self.runs:
            return self.model()  # type: ignore[no-any-return]
        inputs = self._inputs if self._job.inputs is None else called("--inputs", self._job.inputs)
        return self._loss_of(self._output(inputs))

    def _output(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, (tuple, list)) else self.model(inputs)

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self._job.loss is not None:
            loss = called("--loss", self._job.loss, output)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise PlanError(f"--loss {self._job.loss} returned no tensor of one element")
            return loss
        own = getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return own
        leaves = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        if not leaves:
            raise PlanError(f"{self._job.build}: the model's output has no tensor that depends on a parameter")
        self.sums_outputs = leaves[0].numel() > 1 or len(leaves) > 1
        return torch.stack([leaf.sum() for leaf in leaves]).sum()

    def _gradients_alone(self) -> torch.Tensor:
        """In place of a forward that nobody can run: backward makes all gradients, in the order of a model that uses
        its parameters in theirs."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        x = torch.zeros((), device=parameters[0].device, requires_grad=True)
        for parameter in parameters:
            x = _Use.apply(x, parameter)
        return x


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.empty_like(ctx.saved_tensors[0])


def optimizer_makers(job: Job) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """By implementation: what makes the user's optimizer of parameters.

    torch's come as they are built without an option (on a CPU as a for-loop, on a GPU as foreach), and as fused, unless
    an option says which; all others as they are.
    """
    make, options = optimizer_named(job.optimizer), options_of(job.options)
    choices = []
    if is_in_torch_optim(make) and not any(options.get(one) for one in IMPLEMENTATIONS):
        takes = inspect.signature(make).parameters
        choices = [one for one in IMPLEMENTATIONS if one in takes]
    if not choices:
        named = [one for one in IMPLEMENTATIONS if options.get(one)]
        return {named[0] if named else "as it comes": _maker(job, make, options)}
    found = {one: _maker(job, make, {**options, one: True}) for one in choices}
    if "foreach" in found and not torch.cuda.is_available():
        found.pop("foreach")
        found = {FOR_LOOP: _maker(job, make, {**options, **dict.fromkeys(choices, False)}), **found}
    return found


def _maker(
    job: Job, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> Callable[[Any], torch.optim.Optimizer]:
    def made(parameters: Any) -> torch.optim.Optimizer:
        try:
            optimizer = make(parameters, **options)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise PlanError(f"--optimizer {job.optimizer} with {options} raised {said}") from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(f"--optimizer {job.optimizer} made a {type(optimizer).__name__}, not a torch optimizer")
        if callable(train := getattr(optimizer, "train", None)):
            train()  # schedule-free ones want to be told
        return optimizer

    return made


# A few steps of the training loop without data, and what they would have taken.
#
# The loop, the model, the optimizer and ``attach`` are the real ones; every tensor is counted as it is made and freed.
# Where the real ones need other ranks or threads, this does with the memory what they do: DDP's buckets hold all
# gradients, and a step behind the next forward goes bucket by bucket.


MakeOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]
Hold = Callable[[], AbstractContextManager[None]]
Buckets = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen.

    Attributes:
        peak: the most bytes in a step, of everything.
        own: parameters, buffers and state.
        state: of each parameter, bytes by dtype, by its position in the model.
        activations: bytes that the forward left for backward.
        buckets: names of the parameters that instep stepped together, on one device.
    """

    peak: int
    own: int
    state: dict[int, Counter[str]]
    activations: int
    buckets: tuple[tuple[str, ...], ...] = ()


def bytes_by_dtype(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    return found


def order_of_gradients(planned: PlannedModel) -> list[str]:
    """Names of the parameters, as their gradients arrive in backward."""
    order: list[str] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, p in planned.model.named_parameters()
        if p.requires_grad
    ]
    with planned.fakes(), _explained("backward"):
        planned.loss().backward()
    for handle in handles:
        handle.remove()
    for parameter in planned.model.parameters():
        parameter.grad = None
    return order


def forward_flops(planned: PlannedModel) -> int:
    """Operations of matrix products, convolutions and attention: what torch's own counter counts."""
    with planned.fakes(), _explained("forward"), FlopCounterMode(display=False) as counter:
        planned.loss()
    flops: int = counter.get_total_flops()
    return flops


class DryRun:
    """One optimizer on one model. Each way to train goes on where the one before has stopped.

    Args:
        micro_batches: how many there are in a step.
    """

    def __init__(self, planned: PlannedModel, make: MakeOptimizer, micro_batches: int = 1) -> None:
        self._planned = planned
        self._micro_batches = micro_batches
        tensors = [*planned.model.parameters(), *planned.model.buffers()]
        self._there = sum(bytes_by_dtype(tensors).values())
        self._live = LiveInside(tensors)
        with planned.fakes(), self._live:
            self._optimizer = make(p for p in planned.model.parameters() if p.requires_grad)
        self._step(self._optimizer.step)  # makes the optimizer's state

    def plain(self, permanent: Buckets = (), *, view: bool = False) -> Measured:
        """The plain loop.

        Args:
            permanent: DDP's buckets, which are there for good;
            view: and of which the gradients are views.
        """
        with self._flat(permanent, view):
            return self._counted(self._optimizer.step)

    def attached(self, bucket_bytes: int | None, *, undo: bool = False, together: bool = False) -> Measured:
        """With ``instep.attach``, in ``schedule="backward"``, on one device.

        Args:
            together: whether ``micro_batches()`` runs them; else all but the last are in ``accumulate()``.
        """
        with self._planned.fakes.copying():  # it tries optimizers out, on copies of what they have
            attached = attach(
                self._planned.model, self._optimizer, schedule="backward", undo=undo, bucket_bytes=bucket_bytes
            )
        with attached as overlap:
            how = overlap if together else overlap.accumulate
            self._step(self._optimizer.step, how)  # after which buckets follow the order in which gradients arrived
            seen = self._counted(self._optimizer.step, how)
            return replace(seen, buckets=tuple(tuple(p.name for p in one.parameters) for one in overlap.plan.buckets))

    def by_bucket(
        self, buckets: Buckets, permanent: Buckets = (), *, view: bool = False, undo: bool = False
    ) -> Measured:
        """All gradients are there before the step, which goes bucket by bucket.

        Args:
            permanent: as for ``plain``, and
            view: too.
            undo: whether parameters and state are copied, until all have been stepped.
        """
        with self._flat(permanent, view):
            return self._counted(partial(_step_by_bucket, self._optimizer, buckets, undo))

    @contextmanager
    def _flat(self, permanent: Buckets, view: bool) -> Iterator[None]:
        with self._planned.fakes(), self._live:
            flat = [_Flat(bucket, view) for bucket in permanent]
        try:
            yield
        finally:
            for one in flat:
                one.remove()

    def _counted(self, step: Callable[[], object], how: Attachment | Hold = nullcontext) -> Measured:
        self._live.reset()
        activations = self._step(step, how)
        places = {id(p): number for number, p in enumerate(self._planned.model.parameters())}
        state = {
            places[id(p)]: bytes_by_dtype(value for value in entry.values() if isinstance(value, torch.Tensor))
            for p, entry in self._optimizer.state.items()
            if isinstance(p, torch.Tensor)
        }
        own = self._there + sum(sum(one.values()) for one in state.values())
        return Measured(self._there + self._live.peak, own, state, activations)

    def _step(self, step: Callable[[], object], how: Attachment | Hold = nullcontext) -> int:
        """One iteration; the bytes that its first forward left for backward.

        Args:
            how: what runs all micro-batches, or is around all of them but the last.
        """
        activations: list[int] = []
        with self._planned.fakes(), self._live:
            if isinstance(how, Attachment):
                with _explained("backward"):
                    how.micro_batches(lambda _: self._forward(activations), range(self._micro_batches))
            else:
                for number in range(self._micro_batches):
                    with nullcontext() if number + 1 == self._micro_batches else how():
                        loss = self._forward(activations)
                        with _explained("backward"):
                            loss.backward()
                        del loss
            with _explained(f"{type(self._optimizer).__name__}.step()"):
                step()
            self._optimizer.zero_grad()
        return activations[0]

    def _forward(self, activations: list[int]) -> torch.Tensor:
        before = self._live.now
        with _explained("forward"):
            loss = self._planned.loss()
        activations.append(self._live.now - before)
        return loss


class _Flat:
    """One of DDP's buckets: gradients are copied into it as they arrive, and with ``view`` are then a part of it."""

    def __init__(self, parameters: Sequence[torch.Tensor], view: bool) -> None:
        self._buffer = parameters[0].new_empty(sum(p.numel() for p in parameters))
        self._handles = []
        for parameter, part in zip(parameters, self._buffer.split([p.numel() for p in parameters]), strict=True):
            if view:
                hook = partial(_become_view, part.view(parameter.shape))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _become_view(part: torch.Tensor, parameter: torch.Tensor) -> None:
    parameter.grad = part


def _step_by_bucket(optimizer: Optimizer, buckets: Buckets, undo: bool) -> None:
    stepper = Stepper(optimizer)
    if undo:
        stepper.options.append(UndoCopies(stepper.name, Undo(host=False)))
    for bucket in buckets:
        mine = [p for p in bucket if p.grad is not None]
        if not mine:
            continue
        stepper.step(mine, begins=lambda: None)
        if not undo:
            for parameter in mine:
                parameter.grad = None
    stepper.commit()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """What a program without data cannot do becomes one line."""
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise PlanError(
            f"{what} cannot be rehearsed without data: {type(error).__name__}: {lines[0]}. What depends on the values "
            "of tensors, or calls kernels that torch does not know, cannot be planned"
        ) from error
