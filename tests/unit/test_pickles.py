"""What is saved or copied of an attached model is a plain model: no name of instep's, no hook, the user's own kept."""

import copy
import copyreg
import io
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import instep
from instep._torch.hooks import BoundHook
from instep.errors import UncommittedStepError
from tests.cases import Blocks, batch

OPTIONS: dict[str, dict[str, Any]] = {
    "backward": {"schedule": "backward"},
    "undo": {"schedule": "backward", "undo": True},
    "forward": {"schedule": "forward", "defer": True},
}
WHAT: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "model": lambda model, optimizer: model,
    "a module in it": lambda model, optimizer: model.inner,
    "optimizer": lambda model, optimizer: optimizer,
    "parameter": lambda model, optimizer: model.inner.weight,
    "both": lambda model, optimizer: {"model": model, "optimizer": optimizer},
}


def build(way: str | None) -> tuple[Blocks, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if way is not None:
        instep.attach(model, optimizer, bucket_bytes=2_000, **OPTIONS[way])
    return model, optimizer


def to_point(model: nn.Module, optimizer: torch.optim.Optimizer, point: str) -> None:
    for i in range(("attached", "stepped", "backward").index(point) + 1):
        if i > 0:
            optimizer.zero_grad()
            model(batch(i)[0]).sum().backward()
            if i == 1:
                optimizer.step()


def saved(what: object) -> tuple[bytes, bytes]:
    """The file, and the pickle in it."""
    file = io.BytesIO()
    torch.save(what, file)
    archive = zipfile.ZipFile(file)
    return file.getvalue(), archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("point", ["attached", "stepped", "backward"])
@pytest.mark.parametrize("way", OPTIONS)
def test_the_file_is_byte_for_byte_the_plain_one(way: str, point: str, what: str) -> None:
    plain, attached = build(None), build(way)
    for loop in (plain, attached):
        to_point(*loop, point)
    if way == "backward" and point == "backward":  # the plain loop would save the old weights
        with pytest.raises(UncommittedStepError):
            saved(WHAT[what](*attached))
        return
    assert saved(WHAT[what](*attached))[1] == saved(WHAT[what](*plain))[1]
    names = {argument for _, argument, _ in pickletools.genops(pickle.dumps(WHAT[what](*attached)))}
    assert not any("instep" in name for name in names if isinstance(name, str))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("way", OPTIONS)
def test_a_copy_has_the_user_s_hooks_and_no_others(way: str, copied: Callable[[Any], Any]) -> None:
    model, optimizer = build(way)
    before = model.register_forward_pre_hook(seen_before)
    after = model.inner.register_forward_hook(seen, always_call=True, with_kwargs=True)
    to_point(model, optimizer, "stepped")
    other = copied(model)
    assert type(other) is Blocks
    for one in other.modules():
        if one is other or copied is not copy.copy:
            tables = [value for name, value in vars(one).items() if name.endswith(("_hooks", "_kwargs", "_called"))]
            assert not any(isinstance(hook, BoundHook) for table in tables for hook in table.values())
    assert list(other._forward_pre_hooks.items()) == [(before.id, seen_before)]
    if copied is not copy.copy:  # which shares the modules
        assert list(other.inner._forward_hooks.items()) == [(after.id, seen)]
        assert set(other.inner._forward_hooks_with_kwargs) == {after.id}
        assert set(other.inner._forward_hooks_always_called) == {after.id}
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert any(isinstance(hook, BoundHook) for hook in model._forward_pre_hooks.values())


def seen_before(*_: object) -> None: ...


def seen(*_: object) -> None: ...


def test_a_file_is_loaded_without_instep_and_as_weights_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    instep.attach(model, optimizer, schedule="backward")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
        found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(found[0].weight, model[0].get_parameter("weight"))
    code = (
        "import sys, torch; sys.modules['instep'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "assert not any(name.startswith('instep.') for name in sys.modules)\n"
        "print(model(torch.ones(1, 4)).item().hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == model(torch.ones(1, 4)).item().hex()


class Own(nn.Linear):
    """Says itself how it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "said": "itself"}


def test_a_class_s_own_way_is_kept() -> None:
    model = Own(3, 3)
    with instep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule="backward"):
        assert pickle.loads(pickle.dumps(model)).said == "itself"
        assert b"instep" not in pickle.dumps(model)


def _reduced(model: Own) -> tuple[Any, ...]:
    return Own, (3, 3), {**vars(model), "said": "copyreg"}


def test_what_was_registered_for_a_class_is_kept_and_put_back() -> None:
    copyreg.pickle(Own, _reduced)
    try:
        model = Own(3, 3)
        with instep.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule="backward"):
            assert pickle.loads(pickle.dumps(model)).said == "copyreg"
            assert b"instep" not in pickle.dumps(model)
        assert copyreg.dispatch_table[Own] is _reduced
    finally:
        del copyreg.dispatch_table[Own]


def test_nothing_is_registered_once_all_attachments_of_a_class_are_gone() -> None:
    before = dict(copyreg.dispatch_table)
    first, second = build("backward"), build("forward")
    assert Blocks in copyreg.dispatch_table
    overlap = instep.attached(first[0])
    assert overlap is not None
    overlap.detach()
    assert b"instep" not in pickle.dumps(second[0])
    del second
    assert copyreg.dispatch_table == before


class CopiesItself(nn.Sequential):
    """Says itself how it is copied: with all that it has, hooks too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopiesItself":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


@pytest.mark.parametrize("kind", [nn.Sequential, CopiesItself])
@pytest.mark.parametrize("schedule", ["backward", "forward"])
def test_a_copy_of_an_attached_model_trains_by_itself(
    schedule: Literal["backward", "forward"], kind: type[nn.Sequential]
) -> None:
    """Its hooks do nothing: they ask nothing of the original, whose step is open."""
    model, x = kind(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instep.attach(model, optimizer, schedule=schedule, defer=schedule == "forward") as overlap:
        copied = copy.deepcopy(model)
        theirs = torch.optim.SGD(copied.parameters(), lr=0.1)
        model(x).sum().backward()
        for _ in range(2):
            copied(x).sum().backward()
            theirs.step()
            theirs.zero_grad()
        assert overlap.step_count == 0
        optimizer.step()
        assert overlap.step_count == 1
    assert instep.attached(copied) is None
