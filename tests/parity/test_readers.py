"""``schedule="forward"``: whoever reads a weight, a gradient or state after ``optimizer.step()`` sees the plain loop's.

Updates come as late as they can here (``late_updates``), so a reader that does not wait sees the old values always.
"""

import copy
import ctypes
import io
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.convert_parameters import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import has_torch_function

import instep
from instep._step.deferred import COMPILES
from instep.errors import StaleAttachmentError, TornStepError, UncommittedStepError
from instep_tools.harness import first_difference, training_state
from tests import net
from tests.cases import Blocks, assign, batch, grad_of, two_groups
from tests.devices import in_dlpack, on_cpu_only
from tests.inside import before_updates
from tests.late import late_updates

SMALL = 2_000  # bytes: several buckets even in these models


@pytest.fixture(autouse=True)
def let_updates_run() -> Iterator[Callable[[], None]]:
    with late_updates() as let_run:
        yield let_run


class Loop:
    """A model, its optimizer, what was made of it before it was attached, and a folder for files."""

    def __init__(self, folder: Path, make: Callable[[], nn.Module] = Blocks) -> None:
        torch.manual_seed(0)
        self.model: Any = make()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(two_groups(self.model), lr=1e-2)
        self.folder = folder
        self.parameters: list[Any] = list(self.model.parameters())
        self.shadow: Any = copy.deepcopy(self.model)
        self.kept = SimpleNamespace()

    def backward(self, i: int) -> None:
        x, y = batch(i)
        nn.functional.cross_entropy(self.model(x), y).backward()

    def step(self, i: int) -> None:
        self.backward(i)
        self.optimizer.step()

    @property
    def weight(self) -> Any:
        return self.model.inner.weight

    @property
    def last(self) -> Any:
        """In a bucket that the first one's update says nothing about."""
        return self.model.outer.weight

    @property
    def gradients(self) -> list[Any]:
        return [p.grad for p in self.model.parameters()]

    def state(self) -> Iterator[tuple[str, Any]]:
        return training_state(self.model, self.optimizer)


Reader = Callable[[Loop], Any]


def plain_values(value: Any) -> Any:
    """The same without tensors and modules, to be compared with ``==``: their types and bytes in their place."""
    if isinstance(value, nn.Module):
        return type(value).__name__, plain_values(value.state_dict())
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            tuple(value.shape),
            bytes(value.detach().contiguous().clone().view(-1).view(torch.uint8).cpu().numpy()),
        )
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(plain_values(k), plain_values(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return value


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def assert_reads_as_plain(
    reader: Reader,
    folder: Path,
    *,
    make: Callable[[], nn.Module] = Blocks,
    before: Reader | None = None,
    steps: int = 3,
    clears: bool = True,
    may_be_stale: bool = False,
    stays_pending: bool = True,
) -> None:
    """``reader`` after each step of the plain and of the attached loop, before the gradients are cleared or after.

    Args:
        before: called on both loops before the model is attached.
        clears: whether the loop clears its gradients.
        may_be_stale: whether ``StaleAttachmentError`` will do in the steps after the first reading.
        stays_pending: whether updates are put off after the first reading too.
    """
    (folder / "plain").mkdir()
    (folder / "attached").mkdir()
    plain, loop = Loop(folder / "plain", make), Loop(folder / "attached", make)
    for one in (plain, loop):
        if before is not None:
            before(one)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        for i in range(steps):
            try:
                loop.step(i)
            except StaleAttachmentError:
                assert may_be_stale
                assert i
                overlap.detach()
                assert first_difference(plain.state(), loop.state()) is None
                return
            plain.step(i)
            assert "pending" in repr(overlap) or (i and not stays_pending)
            for one in (plain, loop):
                if i % 2 and clears:
                    one.optimizer.zero_grad()
            expected = plain_values(reader(plain))
            found = reader(loop)
            assert plain_values(found) == expected
            del found  # who keeps it has the next step taken at once
            for one in (plain, loop):
                if not i % 2 and clears:
                    one.optimizer.zero_grad()
        overlap.synchronize()
        assert first_difference(plain.state(), loop.state()) is None
    assert not any("_Watched" in str(type(p).__mro__) for p in loop.model.parameters())


def each(read: Callable[[Any], Any]) -> Reader:
    """``read`` of every parameter."""
    return lambda loop: [read(p) for p in loop.model.parameters()]


@torch.no_grad()
def moving_average(loop: Loop) -> Any:
    for average, p in zip(loop.shadow.parameters(), loop.model.parameters(), strict=True):
        average.mul_(0.9).add_(p, alpha=0.1)
    return loop.shadow.state_dict()


@torch.no_grad()
def moving_average_at_once(loop: Loop) -> Any:
    torch._foreach_lerp_(list(loop.shadow.parameters()), loop.parameters, 0.1)
    return loop.shadow.state_dict()


def averaged_by(**options: Any) -> Reader:
    def read(loop: Loop) -> Any:
        if not hasattr(loop.kept, "average"):
            loop.kept.average = AveragedModel(loop.model, **options)
        loop.kept.average.update_parameters(loop.model)
        return loop.kept.average

    return read


def dcp_files(loop: Loop) -> Any:
    number = len(list(loop.folder.iterdir()))
    model, optimizer = dcp_state.get_state_dict(loop.model, loop.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=loop.folder / str(number), no_dist=True)
    target = {"model": loop.shadow.state_dict()}
    dcp.load(target, checkpoint_id=loop.folder / str(number), no_dist=True)
    return target


def safetensors_files(loop: Loop) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(loop.model, str(loop.folder / "model"))
    safetensors.save_file(loop.model.state_dict(), str(loop.folder / "state"))
    return [safetensors.load_file(str(loop.folder / name)) for name in ("model", "state")]


def evaluated(grad_mode: Callable[[], Any]) -> Reader:
    def read(loop: Loop) -> Any:
        loop.model.eval()
        with grad_mode():
            out = loop.model(batch(9)[0]).clone()
        loop.model.train()
        return out

    return read


def shares_a_weight(loop: Loop) -> Any:
    if not hasattr(loop.kept, "other"):
        loop.kept.other = nn.Linear(24, 10)
        loop.kept.other.weight = loop.last
        nn.init.zeros_(loop.kept.other.bias)
    return loop.kept.other(torch.ones(1, 24))


def functional_call(loop: Loop) -> Any:
    named = dict(zip(dict(loop.model.named_parameters()), loop.parameters, strict=True))
    return torch.func.functional_call(loop.model, named, (batch(9)[0],))


def traced(loop: Loop) -> Any:
    return torch.jit.trace(loop.model, batch(9)[0])(batch(9)[0])


def exported(loop: Loop) -> Any:
    program = torch.export.export(loop.model, (batch(9)[0],), strict=False)
    return program.module()(batch(9)[0]), program.state_dict


def exported_strictly(loop: Loop) -> Any:
    return torch.export.export(loop.model, (batch(9)[0],), strict=True).module()(batch(9)[0])


def compiled(loop: Loop) -> Any:
    """Traced while an update is due, and called once more while another one is."""
    if not hasattr(loop.kept, "compiled"):
        loop.kept.compiled = torch.compile(loop.model, backend="aot_eager")
    with torch.no_grad():
        return loop.kept.compiled(batch(9)[0])


def compiled_function_of_a_weight(**options: Any) -> Reader:
    def read(loop: Loop) -> Any:
        if not hasattr(loop.kept, "compiled"):
            last = loop.last

            def weighted(x: torch.Tensor) -> torch.Tensor:
                return (last * x).sum()

            loop.kept.compiled = torch.compile(weighted, **options)
        with torch.no_grad():
            return loop.kept.compiled(torch.ones(24))

    return read


def bytes_at_the_address(p: torch.Tensor) -> bytes:
    return ctypes.string_at(p.data_ptr(), p.nbytes)


READERS: dict[str, Reader] = {
    "state_dict": lambda loop: loop.model.state_dict(),
    "state_dict, keep_vars": lambda loop: loop.model.state_dict(keep_vars=True),
    "state_dict of a part": lambda loop: loop.model.outer.state_dict(),
    "torch.save(state_dict)": lambda loop: saved(loop.model.state_dict()),
    "torch.save(module)": lambda loop: saved(loop.model),
    "torch.save(parameter)": lambda loop: saved(loop.last),
    "torch.save(parameters)": lambda loop: saved(loop.parameters),
    "torch.save(optimizer.state_dict)": lambda loop: saved(loop.optimizer.state_dict()),
    "torch.save(optimizer)": lambda loop: saved(loop.optimizer).state_dict(),
    "optimizer.state_dict": lambda loop: loop.optimizer.state_dict(),
    "pickle(model)": lambda loop: pickled(loop.model),
    "pickle(optimizer)": lambda loop: pickled(loop.optimizer).state_dict(),
    "pickle(parameter)": lambda loop: pickled(loop.last),
    "pickle(state_dict)": lambda loop: pickled(loop.model.state_dict()),
    "deepcopy(model)": lambda loop: copy.deepcopy(loop.model),
    "deepcopy(optimizer)": lambda loop: copy.deepcopy(loop.optimizer).state_dict(),
    "deepcopy(both)": lambda loop: list(training_state(*copy.deepcopy((loop.model, loop.optimizer)))),
    "deepcopy(parameter)": lambda loop: copy.deepcopy(loop.last),
    "copy(model)": lambda loop: copy.copy(loop.model)(batch(9)[0]),
    "copy(parameter)": lambda loop: copy.copy(loop.last),
    "parameters held": lambda loop: [p.clone() for p in loop.parameters],
    "named_parameters": lambda loop: {name: p.detach().clone() for name, p in loop.model.named_parameters()},
    "param_groups": lambda loop: [[p.sum() for p in group["params"]] for group in loop.optimizer.param_groups],
    "getattr": lambda loop: loop.last[0, 0].item(),
    ".data": each(lambda p: p.data.clone()),
    ".detach()": each(lambda p: p.detach().clone()),
    ".numpy()": each(lambda p: p.detach().cpu().numpy().copy()),
    ".numpy(force)": each(lambda p: p.numpy(force=True).copy()),
    ".data.numpy()": each(lambda p: p.data.cpu().numpy().copy()),
    "np.array": each(lambda p: np.array(p.detach())),
    ".tolist()": each(lambda p: p.tolist()),
    ".item()": lambda loop: loop.model.outer.bias[3].item(),
    "float": each(lambda p: float(p.sum())),
    "bool": lambda loop: bool((loop.last == loop.shadow.outer.weight).all()),
    "index": each(lambda p: p[..., 1]),
    "iteration": each(lambda p: [row.sum() for row in p]),
    "unbind": each(lambda p: p.unbind()),
    "repr": each(repr),
    "format": each(lambda p: f"{p.flatten()[0]:.9f} {p}"),
    "==": lambda loop: loop.last == loop.shadow.outer.weight,
    "operators": each(lambda p: [-p, p + 1, 1 - p, 2 * p, p / 3, 3 / p, p**2, 2**p, abs(p)]),
    "matmul from the right": lambda loop: torch.ones(1, 10) @ loop.last,
    "linear": lambda loop: nn.functional.linear(torch.ones(1, 24), loop.last, loop.model.outer.bias),
    "einsum": lambda loop: torch.einsum("ij,kj->ik", loop.last, loop.last),
    "out=": torch.no_grad()(lambda loop: torch.add(loop.last, 0, out=torch.empty(0))),
    "aten operator": lambda loop: torch.ops.aten.sum.default(loop.last),
    "_VF": lambda loop: torch._VF.norm(loop.last.detach()),  # type: ignore[attr-defined]
    "conversions": each(
        lambda p: [p.cpu(), p.to(torch.float64), p.double(), p.half(), p.type(torch.float64), p.float()]
    ),
    "views": each(
        lambda p: [p.view(-1), p.T, p.reshape(-1), p.flatten(), p.unsqueeze(0), p.expand_as(p), p.view_as(p)]
    ),
    "stack and cat": lambda loop: [
        torch.stack([loop.last, loop.last]),
        torch.cat([p.flatten() for p in loop.parameters]),
    ],
    "torch.equal": lambda loop: [
        torch.equal(p, q) for p, q in zip(loop.parameters, loop.shadow.parameters(), strict=True)
    ],
    "allclose": lambda loop: torch.allclose(loop.last, loop.shadow.outer.weight, atol=1e-3),
    "torch.tensor": lambda loop: loop.last.detach().new_tensor(loop.last.detach()),
    "linalg.norm": each(torch.linalg.norm),
    "_foreach_norm": lambda loop: torch._foreach_norm(loop.parameters),
    "parameters_to_vector": lambda loop: parameters_to_vector(loop.model.parameters()),
    "storage": each(lambda p: bytes(p.untyped_storage())),
    "typed storage": each(lambda p: p._typed_storage().tolist()),
    "data_ptr": each(bytes_at_the_address),
    "dlpack": each(lambda p: torch.from_dlpack(p.detach()).clone()),
    "to_dlpack": each(lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).clone()),
    "dlpack to numpy": each(lambda p: np.from_dlpack(p.detach()).copy()),
    "AveragedModel": averaged_by(),
    "AveragedModel, multi_avg_fn": averaged_by(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "AveragedModel, avg_fn": averaged_by(avg_fn=lambda average, p, n: 0.9 * average + 0.1 * p),
    "moving average": moving_average,
    "moving average, foreach": moving_average_at_once,
    "load_state_dict into another": lambda loop: loop.shadow.load_state_dict(loop.model.state_dict()) and loop.shadow,
    "copy_ into another": lambda loop: [
        q.data.copy_(p) for p, q in zip(loop.parameters, loop.shadow.parameters(), strict=True)
    ],
    ".data = into another": lambda loop: (
        assign(loop.shadow.outer.weight, "data", loop.last.data.clone()) or loop.shadow
    ),
    "DCP model": lambda loop: dcp_state.get_model_state_dict(loop.model),
    "DCP optimizer": lambda loop: dcp_state.get_optimizer_state_dict(loop.model, loop.optimizer),
    "DCP both": lambda loop: dcp_state.get_state_dict(loop.model, loop.optimizer),
    "DCP files": dcp_files,
    "safetensors": safetensors_files,
    "forward": lambda loop: loop.model(batch(9)[0]),
    "no_grad": evaluated(torch.no_grad),
    "inference_mode": evaluated(torch.inference_mode),
    "forward of a part": lambda loop: loop.model.outer(torch.ones(1, 24)),
    "forward of a block": lambda loop: loop.model.blocks[-1](torch.ones(1, 24)),
    "forward called directly": lambda loop: loop.model.forward(batch(9)[0]),
    "forward of a part called directly": lambda loop: loop.model.outer.forward(torch.ones(1, 24)),
    "a model that shares a weight": shares_a_weight,
    "functional_call": functional_call,
    "autograd.grad": lambda loop: torch.autograd.grad((loop.last**2).sum(), loop.last),
    "jit.trace": traced,
    "export": exported,
    "export, strict": exported_strictly,
    "fx": lambda loop: torch.fx.symbolic_trace(loop.model)(batch(9)[0]),
    "compile": compiled,
    "compiled function": compiled_function_of_a_weight(backend="aot_eager"),
    "compiled function, fullgraph": compiled_function_of_a_weight(backend="eager", fullgraph=True),
    "share_memory_": lambda loop: loop.model.share_memory(),
    "named_children": lambda loop: {
        n: [p.norm() for p in m.parameters(recurse=False)] for n, m in loop.model.named_modules()
    },
    "apply": lambda loop: (
        [loop.model.apply(lambda m: setattr(m, "seen", [float(p.sum()) for p in m.parameters()]))][0].outer.seen
    ),
}


def rows(names: Iterable[str], failing: dict[str, str]) -> list[Any]:
    marks = {**dict.fromkeys(OF_THE_HOST, on_cpu_only), "dlpack": in_dlpack}
    marks["export, strict"] = pytest.mark.races  # torch takes copies of weights for examples, of whatever values
    marks |= {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in failing.items()}
    return [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]


OF_THE_HOST = ("np.array", "np.asarray", "numpy in place", "dlpack to numpy", "numpy from dlpack", "apply_", "map_")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS)
def test_a_reader(reader: str, tmp_path: Path) -> None:
    # Weights that were traced, shown to NumPy, or shared, are stepped at once from then on.
    stays_pending = not reader.startswith(("export", "compile", ".numpy", ".data.numpy", "np.array", "share_memory_"))
    assert_reads_as_plain(READERS[reader], tmp_path, steps=2, stays_pending=stays_pending)


@torch.no_grad()
def decay(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.mul_(0.9)


def clamp(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.data.clamp_(-0.2, 0.2)


def assign_data(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.data = p.data * 0.5


@torch.no_grad()
def write_a_row(loop: Loop) -> None:
    loop.last[0] = 0
    loop.last[1, 2] += 1
    loop.weight.data[0].zero_()


def load_another(assign: bool) -> Reader:
    def write(loop: Loop) -> Any:
        torch.manual_seed(9)
        return str(loop.model.load_state_dict(Blocks().state_dict(), assign=assign))

    return write


def load_and_set_both(loop: Loop) -> Any:
    model, optimizer = copy.deepcopy(dcp_state.get_state_dict(loop.model, loop.optimizer))
    for value in model.values():
        assert isinstance(value, torch.Tensor)
        value.mul_(0.5)
    dcp_state.set_state_dict(loop.model, loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def load_optimizer(loop: Loop) -> None:
    loaded = copy.deepcopy(loop.optimizer.state_dict())
    for entry in loaded["state"].values():
        entry["exp_avg"].zero_()
    loop.optimizer.load_state_dict(loaded)


def load_an_empty_optimizer(loop: Loop) -> None:
    loop.optimizer.load_state_dict(torch.optim.AdamW(two_groups(loop.shadow), lr=3e-3).state_dict())


def add_group(loop: Loop) -> Any:
    if not hasattr(loop.kept, "extra"):
        loop.kept.extra = nn.Parameter(torch.ones(3))
        loop.optimizer.add_param_group({"params": [loop.kept.extra], "lr": 0.5})
    loop.kept.extra.grad = torch.ones(3)
    return loop.kept.extra.clone()


def second_optimizer(**options: Any) -> Reader:
    def write(loop: Loop) -> None:
        if not hasattr(loop.kept, "second"):
            loop.kept.second = torch.optim.SGD(loop.parameters, lr=0.1, momentum=0.9, **options)
        for p in loop.parameters:
            p.grad = torch.ones_like(p)
        loop.kept.second.step()
        loop.kept.second.zero_grad()

    return write


def second_optimizer_on_the_same_gradients(loop: Loop) -> None:
    if not hasattr(loop.kept, "second"):
        loop.kept.second = torch.optim.SGD(loop.parameters, lr=0.1, momentum=0.9)
    loop.kept.second.step()


def train_a_part_by_itself(loop: Loop) -> None:
    """A second backward and step while the first one's update is due."""
    loop.optimizer.zero_grad()
    loop.model.outer(torch.ones(2, 24)).square().mean().backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def change_settings(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.3


def freeze_and_thaw(loop: Loop) -> Any:
    loop.kept.frozen = not getattr(loop.kept, "frozen", False)
    loop.model.inner.requires_grad_(not loop.kept.frozen)
    return loop.weight.requires_grad


def reset_state(loop: Loop) -> None:
    loop.optimizer.state = type(loop.optimizer.state)(dict)


def prune_last(loop: Loop) -> None:
    if not prune.is_pruned(loop.model.outer):
        prune.l1_unstructured(loop.model.outer, "weight", amount=0.5)


def prune_and_remove(loop: Loop) -> None:
    prune.l1_unstructured(loop.model.outer, "weight", amount=0.5)
    prune.remove(loop.model.outer, "weight")


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def parametrize_last(loop: Loop) -> None:
    if not parametrize.is_parametrized(loop.model.outer):
        parametrize.register_parametrization(loop.model.outer, "weight", Double())


def parametrize_and_remove(loop: Loop) -> None:
    parametrize_last(loop)
    parametrize.remove_parametrizations(loop.model.outer, "weight")


def normalized_by(register: Callable[..., Any]) -> Reader:
    def write(loop: Loop) -> None:
        if not hasattr(loop.kept, "normalized"):
            loop.kept.normalized = True
            torch.manual_seed(3)
            register(loop.model.outer)

    return write


def share_the_last(loop: Loop) -> None:
    loop.model.blocks[0][1].weight = loop.model.blocks[1][1].weight


WRITERS: dict[str, Reader] = {
    "mul_": decay,
    ".data.clamp_": clamp,
    ".data =": assign_data,
    "rows": write_a_row,
    "_foreach_mul_": lambda loop: torch._foreach_mul_([p.data for p in loop.parameters], 0.9),
    "_foreach_mul_ of the parameters": torch.no_grad()(lambda loop: torch._foreach_mul_(loop.parameters, 0.9)),
    "copy_": torch.no_grad()(
        lambda loop: [p.copy_(q) for p, q in zip(loop.parameters, loop.shadow.parameters(), strict=True)] and None
    ),
    "nn.init": lambda loop: [nn.init.constant_(loop.last, 0.05), nn.init.zeros_(loop.model.outer.bias)],
    "nn.init of a norm": lambda loop: nn.init.ones_(loop.model.blocks[0][0].weight),
    "reset_parameters": lambda loop: [torch.manual_seed(5), loop.model.outer.reset_parameters()][1],
    "scaled init": lambda loop: [torch.manual_seed(5), nn.init.xavier_uniform_(loop.last)][1],
    "trunc_normal_": lambda loop: [torch.manual_seed(5), nn.init.trunc_normal_(loop.last)][1],
    "vector_to_parameters": lambda loop: vector_to_parameters(
        parameters_to_vector(loop.parameters).detach() * 0.5, loop.parameters
    ),
    "out=": torch.no_grad()(lambda loop: torch.mul(loop.last, 0.5, out=loop.last)),
    "numpy in place": lambda loop: loop.last.detach().numpy().__imul__(0.5),
    "load_state_dict": load_another(assign=False),
    "load_state_dict of itself": lambda loop: str(loop.model.load_state_dict(loop.model.state_dict())),
    "DCP set_state_dict": load_and_set_both,
    "optimizer.load_state_dict": load_optimizer,
    "optimizer.load_state_dict of a new one": load_an_empty_optimizer,
    "add_param_group": add_group,
    "second optimizer": second_optimizer(),
    "second optimizer, foreach": second_optimizer(foreach=True),
    "second optimizer, fused": second_optimizer(fused=True),
    "second optimizer, same gradients": second_optimizer_on_the_same_gradients,
    "the same optimizer again": lambda loop: loop.optimizer.step(),
    "a part trained by itself": train_a_part_by_itself,
    "settings": change_settings,
    "freeze": freeze_and_thaw,
    "optimizer.state =": reset_state,
    "to() that changes nothing": lambda loop: loop.model.to(loop.last.device).float() and None,
    "vector norm and rescale": torch.no_grad()(lambda loop: loop.last.div_(torch.linalg.norm(loop.last))),
    "prune and remove": prune_and_remove,
    "parametrize and remove": parametrize_and_remove,
}
MAY_GO_STALE: dict[str, Reader] = {
    "load_state_dict, assign": load_another(assign=True),
    "double": lambda loop: loop.model.double() and None,
    "half": lambda loop: loop.model.half().float() and None,
    "prune": prune_last,
    "parametrize": parametrize_last,
    "weight_norm": normalized_by(parametrizations.weight_norm),
    "spectral_norm": normalized_by(parametrizations.spectral_norm),
    "orthogonal": normalized_by(parametrizations.orthogonal),
    "a new Parameter": lambda loop: setattr(loop.model.outer, "weight", nn.Parameter(loop.last.detach().clone())),
    "tied anew": share_the_last,
    "no bias any more": lambda loop: setattr(loop.model.outer, "bias", None),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clears", [True, False], ids=["", "gradients kept"])
@pytest.mark.parametrize("writer", rows(WRITERS, {}))
def test_a_writer(writer: str, clears: bool, tmp_path: Path) -> None:
    assert_reads_as_plain(WRITERS[writer], tmp_path, clears=clears, stays_pending=clears)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("writer", MAY_GO_STALE)
def test_a_change_of_the_model_is_exact_or_refused(writer: str, tmp_path: Path) -> None:
    assert_reads_as_plain(MAY_GO_STALE[writer], tmp_path, may_be_stale=True)


def each_gradient(read: Callable[[Any], Any]) -> Reader:
    return lambda loop: [read(g) for g in loop.gradients]


def clip_after_the_step(loop: Loop) -> Any:
    return [nn.utils.clip_grad_norm_(loop.parameters, 0.1), *loop.gradients]


def replace_gradients(loop: Loop) -> Any:
    for p in loop.parameters:
        p.grad = grad_of(p) * 0.5
    return loop.gradients


def add_to_gradients(loop: Loop) -> Any:
    for p in loop.parameters:
        grad_of(p).add_(1.0)
    return loop.gradients


def delete_gradients(loop: Loop) -> Any:
    for p in loop.parameters:
        del p.grad
    return [None for _ in loop.parameters]


def plus_equals(loop: Loop) -> Any:
    for p in loop.parameters:
        p.grad += 0.1 * p.data
    return loop.gradients


def put_back(loop: Loop) -> Any:
    """Another backward in between, whose gradients do not count."""
    kept = loop.gradients
    loop.optimizer.zero_grad()
    loop.backward(7)
    for p, g in zip(loop.parameters, kept, strict=True):
        p.grad = g
    return loop.gradients


def used_and_put_back(loop: Loop) -> Any:
    kept = loop.gradients
    norms = torch._foreach_norm(kept)
    for p, g in zip(loop.parameters, kept, strict=True):
        p.grad = g
    return norms


def second_backward(loop: Loop) -> Any:
    nn.functional.linear(torch.ones(1, 24), loop.last).sum().backward()
    return loop.gradients


def one_more_backward(loop: Loop) -> Any:
    loop.backward(7)
    return loop.gradients


GRADIENT_READERS: dict[str, Reader] = {
    "held": lambda loop: loop.gradients,
    "norm": each_gradient(lambda g: g.norm()),
    ".data": each_gradient(lambda g: g.data.clone()),
    "detach": each_gradient(lambda g: g.detach().clone()),
    "numpy": each_gradient(lambda g: g.cpu().numpy().copy()),
    "np.asarray": each_gradient(lambda g: np.asarray(g).copy()),
    "tolist": each_gradient(lambda g: g.tolist()),
    "item": each_gradient(lambda g: g.view(-1)[0].item()),
    "float": each_gradient(lambda g: float(g.sum())),
    "bool": each_gradient(lambda g: bool(g.isnan().any())),
    "repr": each_gradient(repr),
    "format": each_gradient(lambda g: f"{g}"),
    "index": each_gradient(lambda g: g[..., 1]),
    "about": each_gradient(
        lambda g: [g.is_sparse, g.shape, g.dtype, g.device, g.stride(), g.numel(), len(g), g.requires_grad]
    ),
    "more about": each_gradient(
        lambda g: [g.is_contiguous(), g.layout, g.nbytes, g.is_leaf, g.grad_fn, g.ndim, g.size(0)]
    ),
    "isinstance": each_gradient(lambda g: [isinstance(g, torch.Tensor), torch.is_tensor(g), g is None]),
    "storage": each_gradient(lambda g: bytes(g.untyped_storage())),
    "storage of .data": each_gradient(lambda g: bytes(g.data.untyped_storage())),
    "data_ptr": each_gradient(bytes_at_the_address),
    "dlpack": each_gradient(lambda g: torch.from_dlpack(g).clone()),
    "numpy from dlpack": each_gradient(lambda g: np.from_dlpack(g).copy()),
    "pickle": lambda loop: pickled(loop.gradients),
    "torch.save": lambda loop: saved(loop.gradients),
    "deepcopy": lambda loop: copy.deepcopy(loop.gradients),
    "copy": each_gradient(copy.copy),
    "deepcopy of a parameter": lambda loop: [copy.deepcopy(p).grad for p in loop.parameters],
    "deepcopy of the model": lambda loop: [p.grad for p in copy.deepcopy(loop.model).parameters()],
    "conversions": each_gradient(
        lambda g: [g.double(), g.half(), g.to("cpu"), g.cpu(), g.float(), g.to(torch.bfloat16)]
    ),
    "operators": each_gradient(lambda g: [-g, g + 1, 2 * g, g / 3, g**2, abs(g), g == 0]),
    "_foreach_norm": lambda loop: torch._foreach_norm(loop.gradients),
    "cat": lambda loop: torch.cat([g.view(-1) for g in loop.gradients]),
    "get_total_norm": lambda loop: nn.utils.get_total_norm(loop.gradients),
    "torch.equal": each_gradient(lambda g: torch.equal(g, g.clone())),
    "clip_grad_norm_": clip_after_the_step,
    "clip_grad_norm_, one by one": lambda loop: [
        nn.utils.clip_grad_norm_(p, 0.01, foreach=False) for p in loop.parameters
    ],
    "clip_grad_value_": lambda loop: nn.utils.clip_grad_value_(loop.parameters, 1e-3) or loop.gradients,
    "zero_grad to zeros": lambda loop: loop.optimizer.zero_grad(set_to_none=False) or loop.gradients,
    "zero_grad of the model to zeros": lambda loop: loop.model.zero_grad(set_to_none=False) or loop.gradients,
    "zero_": each_gradient(lambda g: g.zero_()),
    "replaced": replace_gradients,
    "added to": add_to_gradients,
    "plus equals": plus_equals,
    "_foreach_mul_": lambda loop: torch._foreach_mul_(loop.gradients, 0.5) or loop.gradients,
    "detach_": each_gradient(lambda g: g.detach_().clone()),
    "requires_grad_": each_gradient(lambda g: g.requires_grad_(False).clone()),
    "copy_ into one": each_gradient(lambda g: g.copy_(torch.ones_like(g))),
    "copy_ from one": each_gradient(lambda g: torch.empty_like(g).copy_(g)),
    "into a buffer": each_gradient(lambda g: torch.zeros(g.shape).add_(g)),
    "set to None": lambda loop: [assign(p, "grad", None) for p in loop.parameters],
    "deleted": delete_gradients,
    "one cleared": lambda loop: assign(loop.last, "grad", None) or loop.gradients,
    "clip and step again": lambda loop: [clip_after_the_step(loop), loop.optimizer.step(), *loop.gradients],
    "a second backward": second_backward,
    "one more backward of the model": one_more_backward,
    "autograd.grad": lambda loop: torch.autograd.grad(loop.model(batch(5)[0]).sum(), loop.parameters),
    "into another model": lambda loop: [
        assign(q, "grad", grad_of(p).clone()) or grad_of(q)
        for p, q in zip(loop.parameters, loop.shadow.parameters(), strict=True)
    ],
    "given to another model": lambda loop: [
        assign(q, "grad", p.grad) or q.grad for p, q in zip(loop.parameters, loop.shadow.parameters(), strict=True)
    ],
    "swapped for zeros": lambda loop: [
        assign(grad_of(p), "data", torch.zeros_like(grad_of(p))) for p in loop.parameters
    ],
    "hooks": lambda loop: [grad_of(p).register_hook(print) for p in loop.parameters if grad_of(p).requires_grad],
    "compile": lambda loop: torch.compile(lambda g: g.norm(), backend="eager")(loop.last.grad),
    "typed storage": each_gradient(lambda g: g.storage().tolist()),
    "type": each_gradient(lambda g: g.type()),
    "apply_": each_gradient(lambda g: g.apply_(lambda v: v / 2)),
    "map_": each_gradient(lambda g: torch.zeros_like(g).map_(g, lambda a, b: a + b)),
    "typed storage's address": each_gradient(lambda g: g.storage().data_ptr() == g.data_ptr()),
    "Parameter": each_gradient(nn.Parameter),
    "np.array": each_gradient(np.array),
    "shared": each_gradient(lambda g: [g.is_shared(), g.share_memory_().is_shared()]),
    "put back": put_back,
    "used and put back": used_and_put_back,
}


FAILING_GRADIENT_READERS = {"Parameter": "nn.Parameter takes it for a subclass whose detach() is wrong"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", rows(GRADIENT_READERS, FAILING_GRADIENT_READERS))
def test_a_reader_of_gradients(reader: str, tmp_path: Path) -> None:
    def read_and_clear(loop: Loop) -> Any:
        found = plain_values(GRADIENT_READERS[reader](loop))
        loop.optimizer.zero_grad()
        return found

    assert_reads_as_plain(read_and_clear, tmp_path, clears=False, stays_pending=reader != "compile")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", rows(GRADIENT_READERS, FAILING_GRADIENT_READERS))
def test_a_reader_of_gradients_that_are_never_cleared(reader: str, tmp_path: Path) -> None:
    # A gradient that was used while its update was due, and stays, may have an owner that is not known: its next steps
    # may be taken at once.
    assert_reads_as_plain(GRADIENT_READERS[reader], tmp_path, clears=False, stays_pending=False)


def test_gradients_that_are_never_cleared_nor_read(tmp_path: Path) -> None:
    assert_reads_as_plain(lambda loop: None, tmp_path, clears=False, steps=5)


# What cannot be seen: overlap.synchronize() first.


def doubled(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2


def unwatched(weight: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return weight.detach()


def as_data(weight: Any) -> torch.Tensor:
    other = torch.zeros(weight.shape)
    other.data = weight
    return other


def as_gradient(weight: Any) -> torch.Tensor:
    """``gradient=`` of backward."""
    leaf = torch.ones(weight.shape, requires_grad=True)
    (leaf * 1.0).backward(weight)
    assert leaf.grad is not None
    return leaf.grad


def as_grad_outputs(weight: Any) -> torch.Tensor:
    leaf = torch.ones(weight.shape, requires_grad=True)
    return torch.autograd.grad(leaf * 1.0, leaf, grad_outputs=weight)[0]


def with_memory_of(weight: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty(0).set_(weight)


def last(loop: Loop) -> Any:
    return loop.last


UNSEEN: dict[str, tuple[Reader, Callable[[Any], Any]]] = {
    "an address": (lambda loop: (loop.last.data_ptr(), loop.last.nbytes), lambda place: ctypes.string_at(*place)),
    "a traced module": (lambda loop: torch.jit.trace(loop.model, batch(9)[0]), lambda module: module(batch(9)[0])),
    "a scripted function": (lambda loop: (torch.jit.script(doubled), loop.last), lambda given: given[0](given[1])),
    "func.grad": (last, torch.func.grad(lambda p: (p**2).sum())),
    "vmap": (last, torch.vmap(lambda row: row * 2)),
    "torch.tensor(p)": (last, torch.tensor),
    "torch.Tensor(p)": (last, torch.Tensor),
    "new_tensor": (last, lambda p: torch.ones(1).new_tensor(p)),
    "a nested tensor": (last, lambda p: torch.nested.nested_tensor([p])[0]),
    "as_subclass": (last, lambda p: p.as_subclass(torch.Tensor)),
    "Variable": (last, torch.autograd.Variable),
    "FloatTensor": (last, torch.FloatTensor),
    "sparse_coo_tensor": (last, lambda p: torch.sparse_coo_tensor(torch.arange(len(p))[None], p).to_dense()),
    "sparse_csr_tensor": (
        last,
        lambda p: torch.sparse_csr_tensor(torch.tensor([0, len(p)]), torch.arange(len(p)), p).values(),
    ),
    "asarray": (last, lambda p: torch.asarray(p, copy=True)),
    "new": (last, lambda p: torch.ones(1).new(p)),
    "functionalize": (last, torch.func.functionalize(lambda p: p * 2)),
    "_make_subclass": (last, lambda p: torch.Tensor._make_subclass(torch.Tensor, p)),
    "set_": (last, with_memory_of),
    "to_dlpack": (last, lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p))),
    "x.data = p": (last, as_data),
    "gradient=": (last, as_gradient),
    "grad_outputs=": (last, as_grad_outputs),
    "with the watch switched off": (last, unwatched),
}


@on_cpu_only
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", UNSEEN)
def test_what_needs_synchronize(what: str, tmp_path: Path) -> None:
    """What docs/forward.md lists. Made before ``optimizer.step()``, read after: the old value; the new one after
    ``overlap.synchronize()``."""
    make, read = UNSEEN[what]
    plain, loop = Loop(tmp_path), Loop(tmp_path)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        for one in (plain, loop):
            one.step(0)
            one.optimizer.zero_grad()
        overlap.synchronize()
        theirs, ours = make(plain), make(loop)
        old = plain_values(read(ours))
        assert old == plain_values(read(theirs))
        plain.step(1)
        loop.step(1)
        assert "pending" in repr(overlap)
        assert plain_values(read(ours)) == old
        overlap.synchronize()
        assert plain_values(read(ours)) == plain_values(read(theirs)) != old


def test_the_state_of_a_first_step_is_there_when_it_is_read(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True) as overlap:
        loop.step(0)
        assert "pending" in repr(overlap)
        assert len(loop.optimizer.state) == len(loop.parameters)
        assert all(loop.optimizer.state.values())


class Moody(torch.optim.SGD):
    """Its ``step()`` looks at a global before it updates."""

    refuses = False

    def step(self, closure: Any = None) -> Any:
        if Moody.refuses:
            raise ValueError("refused")
        super().step()


@pytest.fixture
def moody() -> Iterator[type[Moody]]:
    yield Moody
    Moody.refuses = False


@on_cpu_only  # elsewhere the update is launched by step()
def test_a_global_that_step_reads_is_read_where_step_is_called(moody: type[Moody], tmp_path: Path) -> None:
    """Of a class of the user's own nothing is put off: it refuses the step as in the plain loop."""
    loop = Loop(tmp_path)
    optimizer = moody(loop.parameters, lr=0.1, momentum=0.9)
    with instep.attach(loop.model, optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        loop.backward(0)
        optimizer.step()
        optimizer.zero_grad()
        before = copy.deepcopy(loop.model.state_dict())
        loop.backward(1)
        moody.refuses = True
        with pytest.raises(ValueError, match="refused"):
            optimizer.step()
        moody.refuses = False
        after = loop.model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert overlap.state == "idle"


@pytest.mark.races
@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda g: g.mul_(2.0)], ids=["zero_", "mul_"])
def test_a_gradient_held_since_before_the_step_and_written_after(write: Callable[[Any], Any], tmp_path: Path) -> None:
    """The plain loop has applied it already. Exact, or an error."""
    plain, loop = Loop(tmp_path), Loop(tmp_path)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        for one in (plain, loop):
            one.backward(0)
            held = one.gradients
            one.optimizer.step()
            for g in held:
                write(g)
        try:
            overlap.synchronize()
        except UncommittedStepError:
            overlap.accept_torn()
            return
        assert first_difference(plain.state(), loop.state()) is None


class Saves(torch.autograd.Function):
    """A weight, which it does not use before backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] + weight.sum(), torch.ones_like(weight)


class HasWhatDoesNotRun(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beside = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, Saves.apply(self.inner(x), self.beside.weight))


@on_cpu_only  # elsewhere the update is launched by step()
@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_function_that_saves_a_weight_without_using_it(fused: bool, synchronized: bool) -> None:
    """Equal, or loud: the version that autograd compares would tell of an old weight, too."""
    weights = []
    for attaches in (False, True):
        torch.manual_seed(0)
        model = HasWhatDoesNotRun()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        # Each parameter in a bucket of its own: nothing in the forward waits for the one that is only saved.
        options: dict[str, Any] = {"schedule": "forward", "defer": True, "bucket_bytes": 1}
        overlap = instep.attach(model, optimizer, **options) if attaches else None
        raises = attaches and not fused and not synchronized
        with pytest.raises(RuntimeError, match="modified by an inplace operation") if raises else nullcontext():
            for i in range(4):
                model(batch(i)[0]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if overlap is not None and synchronized:
                    overlap.synchronize()
        if overlap is not None:
            overlap.detach()
        weights.append([p.detach().clone() for p in model.parameters()])
    if not raises:
        assert all(map(torch.equal, *weights))


@pytest.mark.races
def test_a_write_of_which_nobody_is_told(tmp_path: Path) -> None:
    """As in C++. The update that is due would go on top of it."""
    loop = Loop(tmp_path)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        loop.backward(0)
        loop.optimizer.step()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            loop.model.inner.weight.mul_(2.0)
        with pytest.raises(UncommittedStepError, match=r"'inner.weight' was written.*overlap\.synchronize\(\)"):
            overlap.synchronize()
        overlap.accept_torn()


# Other orders of things.


SAVES: dict[str, Callable[[Any], torch.Tensor]] = {
    "views": lambda model: model(batch(3)[0]).sum(),  # which are owners of the weights' memory
    "weights": lambda model: model.inner.weight.square().sum(),
}


@pytest.mark.parametrize("saves", SAVES)
def test_a_graph_that_saved_the_old_weights_refuses_as_in_the_plain_loop(saves: str, tmp_path: Path) -> None:
    plain, loop = Loop(tmp_path), Loop(tmp_path)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL):
        for one in (plain, loop):
            late = SAVES[saves](one.model)
            one.step(0)
            one.optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                late.backward()


def test_the_users_own_pre_hook_reads_the_weights_first(tmp_path: Path) -> None:
    def before(loop: Loop) -> None:
        loop.kept.sums = []
        for module in loop.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda m, args: loop.kept.sums.append(m.weight.detach().sum()))

    assert_reads_as_plain(lambda loop: [loop.model(batch(9)[0]), *loop.kept.sums], tmp_path, before=before)


# Errors.


@pytest.fixture
def fails_once() -> Iterator[None]:
    """The second update of one parameter raises."""
    count = 0

    def look(parameters: list[torch.Tensor]) -> None:
        nonlocal count
        if any(p.shape == (10, 24) for p in parameters):
            count += 1
            if count == 2:
                raise ZeroDivisionError("the update")

    with before_updates(look):
        yield


def torn_at(loop: Loop) -> instep.Attachment:
    loop.optimizer = torch.optim.SGD(loop.parameters, lr=0.1, momentum=0.9)
    overlap = instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL)
    for i in range(2):
        loop.step(i)
        loop.optimizer.zero_grad()
    assert "pending" in repr(overlap)
    return overlap


USES: dict[str, Callable[[Loop], Any]] = {
    "forward": lambda loop: loop.model(batch(2)[0]),
    "state_dict": lambda loop: loop.model.state_dict(),
    "optimizer.state_dict": lambda loop: loop.optimizer.state_dict(),
    "the weight": lambda loop: loop.last.sum(),
    "synchronize": lambda loop: instep.attached(loop.model).synchronize(),  # type: ignore[union-attr]
    "step": lambda loop: loop.optimizer.step(),
    "no_grad": evaluated(torch.no_grad),
}


@pytest.mark.usefixtures("fails_once")
@pytest.mark.parametrize("use", USES)
def test_an_error_in_the_update_comes_at_the_next_use(use: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    overlap = torn_at(loop)
    with pytest.raises(ZeroDivisionError, match="the update"):
        USES[use](loop)
    for again in ("forward", "step", "synchronize", "no_grad"):
        with pytest.raises(TornStepError) as torn:
            USES[again](loop)
        assert "outer.weight" in torn.value.unsure
        assert torn.value.step == 2
        assert isinstance(torn.value.__cause__, ZeroDivisionError)
    assert "torn" in repr(overlap)
    overlap.accept_torn()
    for i in range(3, 5):
        loop.step(i)
        loop.optimizer.zero_grad()
    overlap.detach()
    assert not threads()


@pytest.mark.usefixtures("fails_once")
def test_buckets_after_the_error_are_not_stepped(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    overlap = torn_at(loop)
    with pytest.raises(ZeroDivisionError):
        overlap.synchronize()
    with pytest.raises(TornStepError) as torn:
        overlap.synchronize()
    names = [name for name, _ in loop.model.named_parameters()]
    assert sorted([*torn.value.applied, *torn.value.unsure, *torn.value.pending]) == sorted(names)
    stepped = [n for n, p in loop.model.named_parameters() if loop.optimizer.state[p]["momentum_buffer"] is not None]
    assert set(torn.value.applied) <= set(stepped)
    overlap.accept_torn()
    overlap.detach()


# Life.


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("instep")]


def run_script(body: str) -> str:
    script = """
        import time, torch, instep
        from torch import nn
        from instep._torch.worker import Worker
        run = Worker.run
        def slow(self, task, place=0):
            return run(self, lambda: (time.sleep(0.1), task()), place)
        Worker.run = slow
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        overlap = instep.attach(model, optimizer, schedule="forward", defer=True, bucket_bytes=1)
        def step():
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert "pending" in repr(overlap)
    """
    code = textwrap.dedent(script) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=net.SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    return done.stdout


@pytest.mark.nightly
def test_data_loader_workers_are_forked_while_an_update_is_due() -> None:
    body = """
        from torch.utils.data import DataLoader
        for epoch in range(2):
            for _ in DataLoader(torch.arange(4.0), num_workers=1, multiprocessing_context="fork"):
                step()
        print("end")
    """
    assert run_script(body) == "end\n"


FORK = """
    import os, signal
    step()
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        {in_the_child}
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    step()
"""


@pytest.mark.parametrize(
    "in_the_child", ["model(torch.ones(2, 8))", pytest.param("overlap.detach()", marks=pytest.mark.nightly)]
)
def test_a_child_forked_while_an_update_is_due_does_not_hang(in_the_child: str) -> None:
    assert run_script(FORK.format(in_the_child=in_the_child)) == "0\n"


@on_cpu_only
def test_code_that_looks_for_subclasses_sees_a_watched_weight(tmp_path: Path) -> None:
    """``nn.MultiheadAttention.forward``, called by itself without gradients, then leaves out its fast path."""
    loop = Loop(tmp_path)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        loop.step(0)
        assert has_torch_function(tuple(loop.model.parameters()))
        overlap.synchronize()
        assert not has_torch_function(tuple(loop.model.parameters()))


@pytest.mark.parametrize("read", [lambda p: p, lambda p: p.grad], ids=["weight", "gradient"])
def test_what_torch_compile_is_given_is_plain(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    """It traces nothing of instep's, and not again after each step."""
    torch.compiler.reset()
    function = torch.compile(lambda tensor: tensor.square().sum(), fullgraph=True, backend="aot_eager")
    plain, loop = Loop(tmp_path), Loop(tmp_path)
    with instep.attach(loop.model, loop.optimizer, schedule="forward", defer=True, bucket_bytes=SMALL) as overlap:
        states = []
        for i in range(2 * COMPILES):
            for one in (plain, loop):
                one.step(i)
            states.append(overlap.state)
            theirs, ours = (function(read(next(one.model.parameters()))) for one in (plain, loop))
            assert torch.equal(theirs, ours)
            for one in (plain, loop):
                one.optimizer.zero_grad()
        assert states == ["pending"] * COMPILES + ["idle"] * COMPILES
        assert "torch.compile traces a function again and again" in repr(overlap)
