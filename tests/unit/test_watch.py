"""Whoever uses a watched parameter in Python is noticed before it is used; nothing else about the parameter changes."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector, vector_to_parameters

from instep._torch.watch import Watch
from tests.cases import assign, grad_of


class Owner:
    """Watches a parameter, and notes what happens to it."""

    def __init__(self, values: bool = True, gradient: bool = True) -> None:
        self.seen: list[str] = []
        self.watch = Watch(self.values if values else None, self.gradient if gradient else None)

    def values(self, parameter: torch.Tensor, func: Any) -> None:
        self.seen.append("values")

    def gradient(self, parameter: torch.Tensor, func: Any) -> None:
        self.seen.append("gradient")


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def weight(owner: Owner) -> Iterator[nn.Parameter]:
    parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    parameter.grad = torch.ones(2, 3)
    owner.watch.start([parameter])
    yield parameter
    owner.watch.stop([parameter])


x = torch.ones(2, 3)
USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "an operator": lambda p: p + 1,
    "an operator on its right": lambda p: 1 + p,
    "a comparison": lambda p: p == p,
    "an index": lambda p: p[0],
    "an index as an index": lambda p: x[p.long() % 2],
    "iteration": list,
    "membership": lambda p: 3.0 in p,
    "a method": lambda p: p.sum(),
    "a function": lambda p: torch.sum(p),
    "a view": lambda p: p.view(-1),
    "a transpose": lambda p: p.T,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "data that is replaced": lambda p: setattr(p, "data", x.clone()),
    "real": lambda p: p.real,
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "an array": lambda p: np.asarray(p.detach()),
    "dlpack": lambda p: np.from_dlpack(p.detach()),
    "bool": lambda p: bool(p[0, 0]),
    "float": lambda p: float(p[0, 0]),
    "repr": repr,
    "a format": lambda p: f"{p}",
    "an address": lambda p: p.data_ptr(),
    "a storage": lambda p: p.untyped_storage(),
    "shared memory": lambda p: p.share_memory_(),
    "a module": lambda p: nn.functional.linear(x, p),
    "a keyword": lambda p: torch.add(input=x, other=p),
    "a list": lambda p: torch.cat([x, p]),
    "a tuple": lambda p: torch.stack((p, x)),
    "a list of lists": lambda p: torch.block_diag(*[x, p]),
    "a nested list": lambda p: torch.meshgrid([p.view(-1), p.view(-1)], indexing="ij"),
    "an index in a tuple": lambda p: x[(p > 2,)],
    "einsum": lambda p: torch.einsum("ij,ij", x, p),
    "equal": lambda p: torch.equal(x, p),
    "a list in C": lambda p: torch._foreach_norm([p, x]),
    "a second list in C": lambda p: torch._foreach_add([x], [p]),
    "an operator of torch.ops": lambda p: torch.ops.aten.add(x, p),
    "an overload of torch.ops": lambda p: torch.ops.aten.add.Tensor(x, p),
    "a list of torch.ops": lambda p: torch.ops.aten.cat([x, p]),
    "an update in place": lambda p: p.mul_(2),
    "an update in place by an operator": lambda p: p.__imul__(2),
    "an update in a list": lambda p: torch._foreach_mul_([p], 2),
    "out": lambda p: torch.add(x, x, out=p),
    "out in a tuple": lambda p: torch.min(torch.ones(3, 2, 3), 0, out=(p, torch.empty(2, 3, dtype=torch.long))),
    "an item that is set": lambda p: p.__setitem__(0, 1.0),
    "copy_": lambda p: p.copy_(x),
    "copy_ from it": lambda p: torch.empty(2, 3).copy_(p),
    "set_": lambda p: p.set_(x.clone()),  # type: ignore[call-overload]  # torch leaves a tensor out
    "an initialisation": lambda p: nn.init.zeros_(p),
    "to a vector": lambda p: parameters_to_vector([p]),
    "from a vector": lambda p: vector_to_parameters(torch.zeros(6), [p]),
    "a conversion": lambda p: p.to(torch.float64),
    "a conversion of its module": lambda p: module_of(p).to(torch.float64),
    "a state dict": lambda p: module_of(p).state_dict(),
    "a state dict that is loaded": lambda p: module_of(p).load_state_dict({"p": x}),
    "a pickle": lambda p: pickle.dumps(p),
    "a file": lambda p: torch.save(p, io.BytesIO()),
    "a copy": lambda p: copy.copy(p),
    "a deep copy": lambda p: copy.deepcopy(p),
    "a deep copy of its module": lambda p: copy.deepcopy(module_of(p)),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p),
    "a function's gradient": lambda p: torch.func.grad(lambda w: w.sum())(p),
    "a functional call": lambda p: torch.func.functional_call(nn.Linear(3, 2, bias=False), {"weight": p}, (x,)),
    "a new parameter": lambda p: nn.Parameter(p),
    "a new embedding": lambda p: nn.Embedding.from_pretrained(p),
    "a new tensor": lambda p: torch.Tensor(p),
    "a subclass": lambda p: p.as_subclass(torch.Tensor),
    "torch.tensor": lambda p: torch.tensor(p),
    "a capsule": lambda p: torch.utils.dlpack.to_dlpack(p),
    "an optimizer": lambda p: torch.optim.SGD([p], lr=0.1).step(),
}
GRADIENT_USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "read": lambda p: p.grad,
    "read by name": lambda p: getattr(p, "gra" + "d"),
    "replaced": lambda p: setattr(p, "grad", x.clone()),
    "cleared": lambda p: setattr(p, "grad", None),
    "deleted": lambda p: delattr(p, "grad"),
    "cleared by an optimizer": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(),
    "cleared by a module": lambda p: module_of(p).zero_grad(),
    "clipped": lambda p: clip_grad_norm_([p], 1.0),
    "measured": lambda p: get_total_norm([grad_of(p)]),
}
METADATA: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.dim(), p.ndim, len(p), p.numel(), torch.numel(p), p.nelement()),
    "layout": lambda p: (p.stride(), p.layout, p.is_contiguous(), p.storage_offset(), p.is_sparse, p.element_size()),
    "dtype and device": lambda p: (p.dtype, p.device, p.is_floating_point(), torch.is_floating_point(p), p.is_cuda),
    "inference": lambda p: (p.is_inference(), torch.is_inference(p)),
    "autograd": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p._version, p.output_nr, p.retains_grad),
    "freezing": lambda p: [p.requires_grad_(False), assign(p, "requires_grad", True)],
    "a hook": lambda p: (
        p.register_hook(lambda g: None).remove(),
        p.register_post_accumulate_grad_hook(print).remove(),
    ),
    "identity": lambda p: (hash(p), id(p), p is p, {p: 1}[p], weakref.ref(p)()),
    "type": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), torch.is_tensor(p), type(p)),
    "an attribute of its own": lambda p: setattr(p, "decay", 0.1),
    "its name": lambda p: p.name,
    "being listed": lambda p: list(module_of(p).parameters()),
    "an optimizer that is made": lambda p: torch.optim.AdamW([p], lr=0.1),
}


UNSEEN = dict.fromkeys(
    ("set_", "vmap", "a function's gradient", "a new tensor", "a subclass", "torch.tensor", "a capsule"),
    "torch's C code takes the parameter without asking its __torch_function__",
)
STILL_WATCHED = dict.fromkeys(
    ("a new parameter", "a new embedding"), "nn.Parameter(p) asks for a tensor of p's class, and p is watched on"
)


def uses(broken: dict[str, str], without: tuple[str, ...] = ()) -> list[Any]:
    return [
        pytest.param(use, marks=pytest.mark.xfail(strict=True, reason=broken[use])) if use in broken else use
        for use in USES
        if use not in without
    ]


def module_of(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.p = parameter
    return module


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("use", uses(UNSEEN | STILL_WATCHED))
def test_a_use_of_the_values_is_noticed(owner: Owner, weight: nn.Parameter, use: str) -> None:
    with torch.no_grad():
        USES[use](weight)
    assert "values" in owner.seen


class Once(Owner):
    """Stops watching once it has noticed, as instep does."""

    def values(self, parameter: torch.Tensor, func: Any) -> None:
        super().values(parameter, func)
        self.watch.stop([parameter])


def result_of(use: str, watch: Watch | None = None) -> tuple[str, torch.Tensor]:
    parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    parameter.grad = torch.ones(2, 3)
    if watch is not None:
        watch.start([parameter])
    torch.manual_seed(0)
    with torch.no_grad():
        result = USES[use](parameter)
    if watch is not None:
        watch.stop([parameter])
    return str(result), parameter.detach()


NOT_COMPARED = ("an address", "a storage", "a pickle", "a capsule", "iteration")


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("use", uses({}, NOT_COMPARED))
def test_a_use_of_the_values_does_what_it_does_without_a_watch(use: str) -> None:
    owner = Once()
    (found, left), (expected, plain) = result_of(use, owner.watch), result_of(use)
    assert found == expected
    assert left.dtype == plain.dtype
    assert torch.equal(left, plain)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("use", uses({}, NOT_COMPARED))
def test_a_use_of_the_values_is_the_plain_one_while_only_the_gradient_is_watched(use: str) -> None:
    owner = Owner(values=False)
    (found, left), (expected, plain) = result_of(use, owner.watch), result_of(use)
    assert found == expected
    assert left.dtype == plain.dtype
    assert torch.equal(left, plain)


@pytest.mark.parametrize("use", GRADIENT_USES)
def test_a_use_of_the_gradient_is_noticed(owner: Owner, weight: nn.Parameter, use: str) -> None:
    GRADIENT_USES[use](weight)
    assert "gradient" in owner.seen


@pytest.mark.parametrize("use", GRADIENT_USES)
def test_a_use_of_the_gradient_alone_is_no_use_of_the_values(owner: Owner, weight: nn.Parameter, use: str) -> None:
    GRADIENT_USES[use](weight)
    assert "values" not in owner.seen


@pytest.mark.parametrize("use", METADATA)
def test_metadata_does_not_count(owner: Owner, weight: nn.Parameter, use: str) -> None:
    METADATA[use](weight)
    assert owner.seen == []


def test_it_is_noticed_before_it_happens() -> None:
    class Early:
        def __init__(self) -> None:
            self.watch = Watch(values=self.change)

        def change(self, parameter: torch.Tensor, func: Any) -> None:
            self.watch.stop([parameter])
            with torch.no_grad():
                parameter.fill_(7.0)

    early, parameter = Early(), nn.Parameter(torch.zeros(2))
    early.watch.start([parameter])
    assert parameter.tolist() == [7.0, 7.0]


@pytest.mark.parametrize(("values", "gradient"), [(True, False), (False, True), (False, False)])
def test_only_what_is_of_interest_is_told(values: bool, gradient: bool) -> None:
    owner, parameter = Owner(values, gradient), nn.Parameter(torch.zeros(2))
    owner.watch.start([parameter])
    parameter.sum()
    parameter.grad = torch.ones(2)
    assert owner.seen == ["values"] * values + ["gradient"] * gradient
    owner.watch.stop([parameter])


def test_two_watched_parameters_in_one_call_are_both_noticed() -> None:
    told: list[torch.Tensor] = []

    class Both:
        def __init__(self) -> None:
            self.watch = Watch(values=self.note)

        def note(self, parameter: torch.Tensor, func: Any) -> None:
            self.watch.stop([parameter])
            told.append(parameter)

    both, pair = Both(), [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    both.watch.start(pair)
    torch._foreach_norm([*pair])
    assert [id(p) for p in told] == [id(p) for p in pair]


def test_the_type_is_restored(owner: Owner) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    owner.watch.start([parameter])
    assert type(parameter) is not nn.Parameter
    owner.watch.stop([parameter])
    assert type(parameter) is nn.Parameter


def test_the_type_keeps_its_name_while_it_is_watched(weight: nn.Parameter) -> None:
    assert type(weight).__name__ == "Parameter"
    assert type(weight).__module__ == nn.Parameter.__module__
    assert repr(weight).startswith("Parameter containing:")


def test_watching_twice_and_stopping_twice_does_nothing_more(owner: Owner, weight: nn.Parameter) -> None:
    watched = type(weight)
    owner.watch.start([weight, weight])
    assert type(weight) is watched
    owner.watch.stop([weight, weight])
    owner.watch.stop([weight])
    assert type(weight) is nn.Parameter


def test_another_watch_does_not_stop_it(owner: Owner, weight: nn.Parameter) -> None:
    Owner().watch.stop([weight])
    weight.sum()
    assert owner.seen == ["values"]


@pytest.mark.parametrize("use", ["a method", "a list in C", "repr", "a deep copy"])
def test_when_the_owner_is_gone_the_parameter_is_plain_again(use: str) -> None:
    owner, parameter = Owner(), nn.Parameter(torch.zeros(2, 3))
    owner.watch.start([parameter])
    del owner
    gc.collect()
    with torch.no_grad():
        USES[use](parameter)
    assert type(parameter) is nn.Parameter


def test_the_watch_keeps_neither_its_owner_nor_the_parameter_alive() -> None:
    owner, parameter = Owner(), nn.Parameter(torch.zeros(2))
    owner.watch.start([parameter])
    gone = weakref.ref(parameter), weakref.ref(owner)
    del parameter
    assert gone[0]() is None
    del owner
    assert gone[1]() is None


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_is_not_watched(owner: Owner, weight: nn.Parameter, how: Callable[[Any], Any]) -> None:
    copied = how(weight)
    owner.seen.clear()
    assert type(copied) is nn.Parameter
    copied.sum()
    assert owner.seen == []
    assert type(weight) is not nn.Parameter


def test_a_result_is_not_watched(owner: Owner, weight: nn.Parameter) -> None:
    results: list[Any] = [weight + 1, weight.detach(), weight.view(-1), weight.data, weight[0], weight.grad]
    owner.seen.clear()
    assert {type(result) for result in results} == {torch.Tensor}
    for result in results:
        result.sum()
    assert owner.seen == []


def test_a_graph_through_a_watched_parameter_is_the_plain_one(weight: nn.Parameter) -> None:
    weight.grad = None
    (weight * 3).sum().backward()
    assert torch.equal(grad_of(weight), torch.full((2, 3), 3.0))


class Named(nn.Parameter):
    kind = "named"
    extra: int

    def label(self) -> str:
        return f"{self.kind} {tuple(self.shape)}"


def test_a_parameter_of_a_class_of_its_own(owner: Owner) -> None:
    parameter = Named(torch.zeros(2))
    parameter.extra = 5
    owner.watch.start([parameter])
    assert isinstance(parameter, Named)
    assert (parameter.label(), parameter.extra) == ("named (2,)", 5)
    assert owner.seen == []
    assert type(copy.deepcopy(parameter)) is Named
    owner.watch.stop([parameter])
    assert type(parameter) is Named


class Doubled(torch.Tensor):
    """Overrides a torch function for itself, as quantized weights override ``linear``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return 2 * super().__torch_function__(func, types, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_that_overrides_torch_functions_goes_on_to_do_so(owner: Owner) -> None:
    parameter = torch.ones(2, 3).as_subclass(Doubled).requires_grad_()
    expected = nn.functional.linear(x, parameter)
    owner.watch.start([parameter])
    found = nn.functional.linear(x, parameter)
    owner.watch.stop([parameter])
    assert owner.seen
    assert type(found) is type(expected)
    assert torch.equal(found, expected)
