"""The user's model, inputs, loss and optimizer, made of fake tensors."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from instep._optim.kinds import is_in_torch_optim
from instep.planning.errors import PlanError
from instep.planning.fake_tensors import FakeTensors
from instep.planning.job import Job
from instep.planning.named import called, optimizer_named, options_of

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
