"""The user's model, inputs, loss and optimizer, made of tensors without data.

``PlannedModel`` and ``optimizer_makers`` make them of a ``Job``: what the job names is imported, called, and put on
``FakeTensors``, on which a training loop runs as it is and takes no memory. Whatever fails is a ``CannotRunError`` of
one line: the user's program runs here, and anything may be raised.
"""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from instep.errors import class_name
from instep_tools.output import CannotRunError
from instep_tools.planning.job import Job

MakeOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]
"""Makes the user's optimizer of parameters."""
IMPLEMENTATIONS = ("foreach", "fused")
"""The options of torch's optimizers that choose an implementation; without one it may be a for-loop."""
FOR_LOOP = "for-loop"


class PlannedModel:
    """The user's model, ready to be trained without data.

    Attributes:
        fakes: the tensors without data that the model is made of.
        runs: whether there are inputs, so that its forward can run.
        sums_outputs: whether the last loss was the sum of the model's outputs, for want of a loss.
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
            raise CannotRunError(
                f"{job.build} returned a {class_name(built, in_full=True)}: let it return a torch.nn.Module, or the "
                "model and its inputs as a pair"
            )
        for name, parameter in built.named_parameters():
            if is_lazy(parameter):
                raise CannotRunError(f"{job.build}: parameter {name!r} has no shape yet (lazy module)")
        self.model = built.train()
        self.fakes.put(self.model)
        if not any(p.requires_grad for p in self.model.parameters()):
            raise CannotRunError(f"{job.build}: the model has no parameter that is trained")
        self.runs = self._inputs is not None or job.inputs is not None
        if not self.runs:
            # On the instance: hooks around the forward still run, as ``attach`` needs.
            self.model.forward = self._gradients_alone

    def loss(self) -> torch.Tensor:
        """Return the loss of one forward, on inputs that are made for it."""
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
                raise CannotRunError(f"--loss {self._job.loss} returned no tensor of one element")
            return loss
        own = getattr(output, "loss", None)
        if isinstance(own, torch.Tensor):
            return own
        # As a real loss would: a scalar that depends on every output with a graph.
        leaves = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
        if not leaves:
            raise CannotRunError(f"{self._job.build}: the model's output has no tensor that depends on a parameter")
        self.sums_outputs = leaves[0].numel() > 1 or len(leaves) > 1
        return torch.stack([leaf.sum() for leaf in leaves]).sum()

    def _gradients_alone(self) -> torch.Tensor:
        """Stand in for a forward that has no inputs: backward makes all gradients, as in a model that uses its
        parameters in the order in which it has them."""
        return torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad]).sum()


def optimizer_makers(job: Job) -> dict[str, MakeOptimizer]:
    """Return functions that make the user's optimizer, by implementation.

    An optimizer of torch's comes as it is built without an option (on a CPU as a for-loop, on a GPU as foreach), and as
    fused, unless an option says which. Any other optimizer comes as it is.
    """
    options = options_of(job.options)
    is_torchs = ":" not in job.optimizer
    make = function_named("--optimizer", job.optimizer, of="torch.optim:" if is_torchs else "")
    named = [one for one in IMPLEMENTATIONS if options.get(one)]
    choices = []
    if make.__module__.startswith("torch.optim.") and not named:
        choices = [one for one in IMPLEMENTATIONS if one in inspect.signature(make).parameters]
    found = {one: partial(_optimizer, job, make, {**options, one: True}) for one in choices}
    if not found:
        return {(*named, "as it comes")[0]: partial(_optimizer, job, make, options)}
    if "foreach" in found and not torch.cuda.is_available():
        found.pop("foreach")
        found = {FOR_LOOP: partial(_optimizer, job, make, {**options, **dict.fromkeys(choices, False)}), **found}
    return dict(found)


def _optimizer(
    job: Job, make: Callable[..., Any], options: Mapping[str, Any], parameters: Iterable[torch.Tensor]
) -> Optimizer:
    try:
        optimizer = make(parameters, **options)
    except Exception as error:
        raise CannotRunError(f"--optimizer {job.optimizer} with {options} raised {said_of(error)}") from error
    if not isinstance(optimizer, Optimizer):
        made = class_name(optimizer, in_full=True)
        raise CannotRunError(f"--optimizer {job.optimizer} made a {made}, not a torch optimizer")
    if callable(train := getattr(optimizer, "train", None)):
        train()  # schedule-free optimizers refuse to step otherwise
    return optimizer


def function_named(option: str, name: str, of: str = "") -> Callable[..., Any]:
    """Return the function ``module:function``. Modules are looked for in the working directory, too.

    Args:
        of: what stands before the name, and was not given.
    """
    if not all((of + name).partition(":")):
        raise CannotRunError(f"{option} {name}: name a function as module:function, as in mymodel:build")
    # A console script has its own folder on the path, and not the working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = resolve_name(of + name)
    except ModuleNotFoundError as error:
        raise CannotRunError(
            f"{option} {name}: there is no module {error.name!r} here or among the installed ones"
        ) from error
    except AttributeError as error:
        raise CannotRunError(f"{option} {name}: {error}") from error
    except Exception as error:
        raise CannotRunError(f"{option} {name}: importing it raised {said_of(error)}") from error
    if not callable(found):
        raise CannotRunError(f"{option} {name}: it is a {type(found).__name__}, and cannot be called")
    return found  # type: ignore[no-any-return]


def called(option: str, name: str, *args: Any) -> Any:
    """Call the function ``name``, and return what it returns. An error of its own becomes one line."""
    function = function_named(option, name)
    try:
        return function(*args)
    except Exception as error:
        raise CannotRunError(
            f"{option} {name} raised {said_of(error)}. It is run without any data, on tensors that have shapes and no "
            "values: build from a configuration, not from files, and on no device"
        ) from error


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Return ``name=value`` pairs as keywords. Values are Python's literals, or plain text."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise CannotRunError(f"--option {pair}: write it as name=value, as in lr=0.1")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
        except (RecursionError, MemoryError) as error:  # of Python's parser
            raise CannotRunError(f"--option {name}: its value is nested too deeply") from error
    return found


def said_of(error: BaseException) -> str:
    """Return an error's class and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class FakeTensors:
    """A mode in which programs run on tensors that have everything but values, and take no memory.

    They are torch's fake tensors, the ones that ``torch.export`` and ``torch.compile`` run models on;
    ``torch._subclasses`` is where torch's own documentation imports them from. All tensors that meet must be of one
    ``FakeTensors``.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._mode, _AnyValue():
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """A mode to build a model in before ``put``: on torch's meta device, on which a model may be moved and cast."""
        with torch.device("meta"), _AnyValue():
            yield

    def put_inputs(self, inputs: Any) -> Any:
        """Return ``inputs`` with tensors without data in place of theirs."""
        with self._mode:
            return tree_map_only(torch.Tensor, self._put, inputs)

    def put(self, model: nn.Module) -> None:
        """Replace all parameters and buffers of ``model`` by tensors without data, on a device that computes."""
        made: dict[int, Any] = {}  # by the old tensor's id: tied tensors stay tied
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


_ITEM = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default


class _AnyValue(TorchDispatchMode):
    """A mode that answers 1 where a program asks for the value of a tensor, as optimizers do for the number of their
    steps. Tensors that are compared are equal."""

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
