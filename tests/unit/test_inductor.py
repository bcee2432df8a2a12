"""What instep asks of torch's compiler: these tests fail where a new torch answers otherwise."""

from collections.abc import Callable, Iterator
from operator import getitem
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
import torch
from torch import fx, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode
from torch.torch_version import TorchVersion

import instep
from instep._torch.engine import WHO_IS_TOLD
from instep._torch.handing_over import HandedOver
from instep._torch.inductor import BackwardGraph, HandOver, _read, _written
from instep.sources.local import _as_accumulated

pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # in torch's own compiler
    pytest.mark.filterwarnings("ignore:Guards may run slower"),  # on Python 3.13.0
    pytest.mark.filterwarnings("ignore:Skipping serialization"),  # torch 2.6, of its own settings
]
WIDTH = 64
HAS_SEVERAL_PASSES = TorchVersion(torch.__version__) >= "2.13"  # else a pass of the user's takes the only place


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    HandedOver.has_code = False  # there is none any more


# A backward graph, made by hand.


class Graph:
    """Of ``y = x @ w.T``, and more: the gradient of ``w`` comes before the last reader of ``w``."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.weight, self.x = (torch.empty(WIDTH, WIDTH, device="meta") for _ in range(2))
        plain = type("PlainTensorMeta", (), {})
        self.metadata = SimpleNamespace(
            input_info=[SimpleNamespace(requires_grad=needed) for needed in (False, True, True)],
            static_input_indices=[1],
            subclass_inp_meta=[plain()] * 3,
            tokens={},
        )

    def input(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, function: Callable[..., Any], *inputs: fx.Node) -> fx.Node:
        node = self.graph.call_function(function, inputs)
        node.meta["val"] = function(*(each.meta["val"] for each in inputs))
        return node

    def ends(self, weight: fx.Node, x: fx.Node, memories: frozenset[int] = frozenset()) -> list[str]:
        """The names of the nodes after the pass."""
        self.graph.output((None, weight, x))
        found = BackwardGraph.of(self.graph, self.metadata, memories)
        assert found is not None
        found.hand_over(1)
        return [node.name for node in self.graph.nodes]


mm, t, mul = torch.ops.aten.mm.default, torch.ops.aten.t.default, torch.ops.aten.mul.Tensor


def test_a_gradient_waits_for_the_last_reader_of_its_weight() -> None:
    made = Graph()
    x, weight, tangent = (
        made.input(name, value)
        for name, value in (("primals_1", made.x), ("primals_2", made.weight), ("tangents_1", made.x))
    )
    gradient = made.call(mm, made.call(t, tangent), x)
    of_x = made.call(mm, tangent, weight)
    names = made.ends(gradient, of_x)
    assert names.index("hand_over_default") > names.index(of_x.name) > names.index(gradient.name)
    call = next(node for node in made.graph.nodes if node.name == "hand_over_default")
    assert call.args == ([gradient], [0], [1], [2, 3], [weight])
    (output,) = (node for node in made.graph.nodes if node.op == "output")
    assert output.args[0][1].target is getitem
    assert output.args[0][1].meta["val"].shape == made.weight.shape
    assert output.args[0][2] is of_x


def test_stand_ins_have_the_form_of_gradients_and_one_number_of_memory() -> None:
    """Their forms are written into code that may be read from disk, by another process."""
    gradients = [torch.ones(2, 3), torch.ones(5, dtype=torch.bfloat16), torch.ones((), dtype=torch.float64)]
    made = [_read(",".join(map(_written, gradients))) for _ in range(2)]
    for gradient, *found in zip(gradients, *made, strict=True):
        assert {(one.shape, one.dtype, one.device) for one in (gradient, *found)} == {
            (gradient.shape, gradient.dtype, gradient.device)
        }
        assert {one.untyped_storage().nbytes() for one in found} == {gradient.element_size()}


def test_a_weight_of_which_the_forward_may_have_saved_a_view_stays() -> None:
    """A view has a name of its own, and is known by its memory; of which weight it is, is not known."""
    for is_known in (True, False):
        made = Graph()
        x, tangent = made.input("primals_1", made.x), made.input("tangents_1", made.x)
        view = made.input("permute_1", made.weight.t())
        gradient = made.call(mm, made.call(t, tangent), x)
        of_x = made.call(mm, tangent, view)
        memories = frozenset([made.weight.untyped_storage()._cdata] if is_known else [])
        assert ("hand_over_default" in made.ends(gradient, of_x, memories)) == (not is_known)


def test_what_is_pointwise_reads_where_it_is_used() -> None:
    made = Graph()
    x, weight, tangent = (
        made.input(name, value)
        for name, value in (("primals_1", made.x), ("primals_2", made.weight), ("tangents_1", made.x))
    )
    scaled = made.call(mul, weight, weight)
    gradient = made.call(mm, made.call(t, tangent), x)
    later = made.call(mul, scaled, tangent)  # which inductor computes with the square in one kernel
    of_x = made.call(mm, later, tangent)
    names = made.ends(gradient, of_x)
    assert names.index("hand_over_default") > names.index(of_x.name)


def test_what_is_an_output_may_be_read_at_the_end() -> None:
    made = Graph()
    x, weight, tangent = (
        made.input(name, value)
        for name, value in (("primals_1", made.x), ("primals_2", made.weight), ("tangents_1", made.x))
    )
    gradient = made.call(mm, made.call(t, tangent), x)
    names = made.ends(gradient, made.call(mul, weight, tangent))
    assert "hand_over_default" not in names


def test_a_gradient_that_is_read_again_stays() -> None:
    made = Graph()
    x, tangent = made.input("primals_1", made.x), made.input("tangents_1", made.x)
    gradient = made.call(mm, made.call(t, tangent), x)
    names = made.ends(gradient, made.call(mm, gradient, x))
    assert "hand_over_default" not in names


# With torch's compiler.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def taken_of(model: nn.Module, *, attach: bool = True, bucket_bytes: int = 1) -> int:
    """How many gradients are handed over in a first backward."""
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not attach:
        compiled(torch.ones(4, WIDTH)).sum().backward()
        return 0
    with instep.attach(compiled, optimizer, schedule="backward", bucket_bytes=bucket_bytes) as overlap:
        compiled(torch.ones(4, WIDTH)).sum().backward()
        source: Any = overlap._parts.sources[0]
        handed = source.compiled.handed_over
        optimizer.step()
    return 0 if handed is None else len(handed.taken)


class Counts(CustomGraphPass):
    """A pass of the user's own."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        self._uuid = str(uuid4())  # so that nothing comes from the disk

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs.append([node.name for node in graph.nodes])

    def uuid(self) -> str:
        return self._uuid


def test_a_pass_of_the_users_own_runs_before() -> None:
    mine = Counts()
    patched: Any = config
    with patched.patch(post_grad_custom_post_pass=mine):
        assert taken_of(Net()) == (3 if HAS_SEVERAL_PASSES else 0)
        assert config.post_grad_custom_post_pass is mine
    forward, backward = mine.graphs
    assert not any("hand_over" in name for name in (*forward, *backward))


def test_compiled_code_is_kept_apart_by_what_the_pass_decides() -> None:
    """The same graph, compiled for a plain loop, for one that is attached, and for other groups: what torch keeps of
    one is not another's."""
    code: list[tuple[bool, int]] = [(False, 1), (True, 1), (True, 10 * WIDTH * WIDTH), (False, 1), (True, 1)]
    taken = []
    for attach, size in code:
        torch._dynamo.reset()
        taken.append(taken_of(Net(), attach=attach, bucket_bytes=size))
    assert taken == [0, 3, 0, 0, 3]


def test_compiled_code_is_kept_apart_by_what_it_may_overwrite() -> None:
    """Which torch decides beside the graph, and keeps in no key of its own."""
    made = HandOver(lambda _: 1)
    uuids = []
    for donated in ([], [3], [3, 5], [3]):
        context = TracingContext(FakeTensorMode())
        context.fw_metadata = cast(Any, SimpleNamespace(static_input_indices=[0], bw_donated_idxs=donated))
        with tracing(context):
            uuids.append(made.uuid())
    assert uuids[1] == uuids[3]
    assert len({*uuids}) == 3


def test_nothing_is_asked_of_the_compiler_but_while_it_compiles() -> None:
    assert taken_of(Net()) == 3
    assert config.post_grad_custom_post_pass is None
    torch._dynamo.reset()
    counters.clear()
    taken_of(Net(), attach=False)
    assert config.post_grad_custom_post_pass is None
    assert taken_of(Net()) == 0  # by the code that the plain loop has, which is not compiled again
    assert counters["stats"]["unique_graphs"] == 1
    assert WHO_IS_TOLD is callback_handler.start_callbacks


def test_the_compiler_has_the_names_that_are_used() -> None:
    """Where one is gone, gradients stay where torch puts them, without an error."""
    assert not HAS_SEVERAL_PASSES or custom_graph_pass.get_custom_graph_passes(None) == ()
    assert taken_of(Net()) == 3


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="from torch 2.10 on")
def test_what_is_handed_over_is_cast_as_autograd_casts_it() -> None:
    parameter: Any = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    numbers = torch.arange(6.0, dtype=torch.bfloat16)
    for gradient in (numbers.view(2, 3), numbers.view(3, 2).T):
        parameter.grad = _as_accumulated(parameter, gradient, is_kept=False)
        assert parameter.grad.dtype is torch.float32
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, gradient.float())
