"""Runs the tests that torch ships for its private overlap of optimizers, with instep's functions in their place.

They are methods of ``torch.testing._internal.distributed.distributed_test.DistributedTest._DistTestBase``, and skip
themselves without a GPU for each rank; ``shipped_on_cpu`` does without. All that is put in place of something of
torch's counts its calls: a test that never reaches it proves nothing.
"""

import contextlib
import functools
import importlib
import inspect
import io
import os
import types
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.functional import shipped_on_cpu

SHIPPED = "torch.testing._internal.distributed.distributed_test"
OVERLAP = "torch.distributed.algorithms._optimizer_overlap"
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

# Parts of test_ddp_uneven_inputs that are left out. 200 GFLOP a forward, hundreds of times, in the ways of the others:
TOO_LARGE = "large_conv_model"
# A rank that joins before any backward sends what its map of used parameters was allocated with (reducer.cpp,
# initialize_local_used_map), so an unused parameter of the others gets zeros, or no gradient, as it happens.
UNDEFINED_IF_JOINED_AT_ONCE = "unjoined_rank_with_unused_params_model"


Checksums = list[tuple[int | None, ...]]
"""For every backward, of each gradient."""


class Replacement(NamedTuple):
    """``name`` in the module ``where``, in which shipped code looks it up; what instep calls it."""

    where: str
    name: str
    instep_name: str
    makes_hook: bool = False


APPLY_IN_BACKWARD = Replacement(SHIPPED, "_apply_optimizer_in_backward", "apply_optimizer_in_backward")
IN_BACKWARD_HOOK = Replacement(
    f"{HOOKS}.optimizer_overlap_hooks", "_apply_optim_in_backward_hook", "apply_optim_in_backward_hook", makes_hook=True
)
AS_OVERLAPPED = Replacement(OVERLAP, "_as_overlapped_optim", "as_overlapped_optim")
HOOK_STATE = Replacement(f"{OVERLAP}.optimizer_overlap", "_OptimizerHookState", "OptimizerHookState")
HOOK_THEN_OPTIMIZER = Replacement(
    f"{OVERLAP}.optimizer_overlap", "_hook_then_optimizer", "hook_then_optimizer", makes_hook=True
)
UPCAST_STATE = Replacement(f"{HOOKS}.mixed_precision_hooks", "_AllreduceUpcastHookState", "AllreduceUpcastHookState")
UPCAST_HOOK = Replacement(
    f"{HOOKS}.mixed_precision_hooks", "_reducer_allreduce_and_upcast_hook", "reducer_allreduce_and_upcast_hook"
)


class Case(NamedTuple):
    """A shipped test and how it is run.

    Attributes:
        name: for the reader.
        method: of the shipped class.
        arguments, keywords: of the method.
        replacements: what takes the place of torch's.
        idle: a hook with nothing to step, which must leave DDP's gradients as they are without it. Either
            ``IN_BACKWARD_HOOK``, given to every DDP of the test that has no hook of its own; or
            ``HOOK_THEN_OPTIMIZER``, around every hook that the test itself registers.
        ddp_streams: whether DDP's own hooks have to be spared the streams that a CPU has not got.
        exact: compare bit for bit where torch's test would allow a tolerance.
    """

    name: str
    method: str
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    replacements: tuple[Replacement, ...] = ()
    idle: Replacement | None = None
    ddp_streams: bool = False
    exact: bool = False

    @property
    def must_be_called(self) -> set[str]:
        used = [*self.replacements, *([self.idle] if self.idle else [])]
        return {each.instep_name for each in used} | {_hook_of(each) for each in used if each.makes_hook}


def _hook_of(replacement: Replacement) -> str:
    return f"the hook of {replacement.instep_name}"


def run_shipped(case: Case, source: str = "instep") -> dict[str, int]:
    """Run ``case`` over the functions of the module ``source``; how often each was called. A body for ``RankPool``.

    With ``"torch"`` over torch's own, under shims for streams: a test that fails over both fails for the harness.

    Where the shipped test cannot tell much, DDP's gradients are compared too, bit for bit after every backward: with
    those of the same test without the hook, or of torch's own mixed precision.
    """
    calls: Counter[str] = Counter()
    gradients = _run(case, _replacements(case, source, calls), source)
    if case.idle is not None:
        _require_same(gradients, _run(case, [], source))
    elif case.ddp_streams and source != "torch":
        expected = _run(case, _replacements(case, "torch", Counter()), "torch")
        # The same step again and again; in the first one torch's own reduces memory that nothing was written to.
        _require_same(gradients, expected[1:2] + expected[1:])
    return dict(calls)


def _require_same(gradients: Checksums, expected: Checksums) -> None:
    assert len(gradients) == len(expected), f"{len(gradients)} backward calls, not {len(expected)}"
    different = [number for number, each in enumerate(gradients) if each != expected[number]]
    assert not different, f"DDP has other gradients than it should, after the backward calls number {different}"


def _run(case: Case, patches: Iterable[shipped_on_cpu.Shim], source: str) -> Checksums:
    """Run ``case``; what it made of DDP's gradients, if that is to be compared."""
    gradients: Checksums = []
    watching = _watching(gradients) if case.idle or case.ddp_streams else ()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        # As torch's own runner does: tests that seed nothing want the same numbers on every rank.
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(1234)
        environment = {"BACKEND": "gloo", "WORLD_SIZE": str(dist.get_world_size())}
        stack.enter_context(mock.patch.dict(os.environ, environment))
        shipped = _import_shipped()
        for patch in (*_shims(shipped, case, source), *patches, *watching):
            stack.enter_context(patch)
        tests = _tests(shipped, case.exact)()
        # Past the decorators, which skip without GPUs.
        inspect.unwrap(getattr(type(tests), case.method))(tests, *case.arguments, **dict(case.keywords))
    return gradients


def _import_shipped() -> types.ModuleType:
    """The shipped module, without what importing it does to this process, which runs other tests too."""
    with mock.patch.object(torch.backends, "disable_global_flags"), warnings.catch_warnings():
        return importlib.import_module(SHIPPED)


def _shims(shipped: types.ModuleType, case: Case, source: str) -> Iterator[shipped_on_cpu.Shim]:
    yield mock.patch.object(shipped, "HAS_TORCHVISION", False)
    yield from shipped_on_cpu.devices(shipped)
    if case.ddp_streams:
        yield from shipped_on_cpu.ddp_streams()
    if source == "torch":
        yield shipped_on_cpu.streams()


def _tests(shipped: types.ModuleType, exact: bool) -> type:
    from torch.testing._internal.common_utils import TestCase

    class Tests(shipped.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc, name-defined]
        rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: str(dist.get_world_size()))

        def _run_uneven_inputs_test(self, test_case: Any, iterations: dict[int, int], **kwargs: Any) -> None:
            undefined = test_case.name == UNDEFINED_IF_JOINED_AT_ONCE and 0 in iterations.values()
            if test_case.name != TOO_LARGE and not undefined:
                super()._run_uneven_inputs_test(test_case, iterations, **kwargs)

    class ExactTests(Tests):
        # assertNotEqual calls it with tolerances, and so keeps torch's.
        def assertEqual(  # type: ignore[override]  # noqa: N802  # torch's own arguments
            self, x: Any, y: Any, msg: Any = None, *, atol: Any = 0, rtol: Any = 0, **kwargs: Any
        ) -> None:
            super().assertEqual(x, y, msg, atol=atol, rtol=rtol, **kwargs)  # noqa: PT009

    return ExactTests if exact else Tests


def _watching(gradients: Checksums) -> Iterator[shipped_on_cpu.Shim]:
    """After every backward, append the gradients of each DDP that was called since the last."""
    called: list[DistributedDataParallel] = []
    forward, backward = DistributedDataParallel.forward, torch.Tensor.backward

    def noted_forward(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        called.append(ddp)
        return forward(ddp, *args, **kwargs)

    def watched_backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(tensor, *args, **kwargs)
        gradients.append(tuple(_checksum(p.grad) for ddp in called for p in ddp.parameters()))
        called.clear()

    yield mock.patch.object(DistributedDataParallel, "forward", noted_forward)
    yield mock.patch.object(torch.Tensor, "backward", watched_backward)


def _checksum(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else zlib.crc32(gradient.detach().flatten().view(torch.uint8).cpu().numpy().data)


def _replacements(case: Case, source: str, calls: Counter[str]) -> Iterator[shipped_on_cpu.Shim]:
    for each in case.replacements:
        function = _counted_from(source, each, calls)
        if each == APPLY_IN_BACKWARD:
            yield _requiring_steps(function)
        else:
            yield mock.patch.object(importlib.import_module(each.where), each.name, function)
    if case.idle == IN_BACKWARD_HOOK:
        carry = _carrying(_counted_from(source, IN_BACKWARD_HOOK, calls))
        # Where DDP itself registers it if there is something to step.
        yield mock.patch.object(DistributedDataParallel, "_setup_in_backward_optimizers", carry)
    if case.idle == HOOK_THEN_OPTIMIZER:
        state, then = (_counted_from(source, each, calls) for each in (HOOK_STATE, HOOK_THEN_OPTIMIZER))
        register = _registering(DistributedDataParallel.register_comm_hook, state, then)
        yield mock.patch.object(DistributedDataParallel, "register_comm_hook", register)


def _counted_from(source: str, replacement: Replacement, calls: Counter[str]) -> Callable[..., Any]:
    """The function that ``source`` has for ``replacement``, counting its calls and those of a hook that it makes."""
    where, name = (replacement.where, replacement.name) if source == "torch" else (source, replacement.instep_name)
    function = _counted(getattr(importlib.import_module(where), name), replacement.instep_name, calls)
    if not replacement.makes_hook:
        return function

    def make(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return _counted(function(*args, **kwargs), _hook_of(replacement), calls)

    return make


def _counted(function: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)  # DDP looks at the signature and the name of a hook
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


@contextlib.contextmanager
def _requiring_steps(apply: Callable[..., None]) -> Iterator[None]:
    """Every parameter given to ``apply`` must have changed in the end: one shipped test does not look."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def apply_to(*args: Any, params: Iterable[torch.Tensor], **kwargs: Any) -> None:
        params = list(params)
        before.extend((parameter, parameter.detach().clone()) for parameter in params)
        apply(*args, params=params, **kwargs)

    with mock.patch.object(importlib.import_module(APPLY_IN_BACKWARD.where), APPLY_IN_BACKWARD.name, apply_to):
        yield
    unchanged = sum(torch.equal(parameter, value) for parameter, value in before)
    assert not unchanged, f"{unchanged} of {len(before)} parameters were never stepped"


def _carrying(make_hook: Callable[..., Any]) -> Callable[[DistributedDataParallel], None]:
    def carry(ddp: DistributedDataParallel) -> None:
        if not ddp._comm_hooks:  # DDP takes one
            ddp.register_comm_hook(weakref.ref(ddp), make_hook(ddp.gradient_as_bucket_view))

    return carry


class _NeverSteps:
    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        raise AssertionError("stepped a parameter that is not to be optimized")


def _registering(
    register: Callable[..., None], make_state: Callable[..., Any], then: Callable[..., Any]
) -> Callable[..., None]:
    def register_wrapped(ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        register(ddp, state, then(hook, make_state(_NeverSteps(), [])))

    return register_wrapped
