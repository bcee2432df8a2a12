"""Checkpoints that are not what was saved: each is refused, and nothing of it is written."""

import copy
import hashlib
import importlib
import json
import logging
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import instep
from instep.checkpoint.boxes import Box, cover_once
from instep.checkpoint.files import DIGEST, MANIFEST
from instep.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.loops import everything, load_from, made, require_same, sign


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.outer = nn.Linear(3, 2)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def small(seed: int = 0) -> Any:
    model, optimizer = made(adam, seed, Small)
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    extra = {"rng": torch.get_rng_state()[:64], "python": (3, [1.5, float("nan")], b"x"), 1: {"a": None}}
    return instep.save(tmp_path_factory.mktemp("saved"), *small(), step=7, extra=extra)


class Target:
    """What is loaded into, again and again, with what it was before."""

    def __init__(self) -> None:
        self.loop = small(seed=1)
        self.before = list(everything(*self.loop))

    def refuses(
        self, path: Path, match: str | None = None, error: type[CheckpointError] = CheckpointError
    ) -> CheckpointError:
        with pytest.raises(error, match=match) as raised:
            instep.load(path, *self.loop)
        require_same(self.before, self.loop, "a load that failed")
        assert all(p.grad is not None for p in self.loop[0].parameters())
        return raised.value

    def loads_or_refuses(self, path: Path) -> bool:
        """Whether it was loaded. Another one is made then."""
        try:
            instep.load(path, *self.loop)
        except CheckpointError:
            require_same(self.before, self.loop, "a load that failed")
            return False
        self.__init__()  # type: ignore[misc]
        return True


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


FILES = [MANIFEST, DIGEST, "rank-00000.safetensors"]


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


@pytest.mark.parametrize(
    ("change", "times"),
    [
        (flip, 40),
        (truncate, 30),
        pytest.param(flip, 1000, marks=pytest.mark.nightly),
        pytest.param(truncate, 500, marks=pytest.mark.nightly),
    ],
)
def test_every_flipped_bit_and_every_truncation_is_found(
    saved: Path, copied: Path, target: Target, change: Callable[[Path, random.Random], None], times: int
) -> None:
    rng = random.Random(times)
    sizes = [(saved / name).stat().st_size for name in FILES]
    for i in range(times):
        # By size, and each file often enough.
        name = rng.choices(FILES, sizes)[0] if i % 2 else FILES[i // 2 % 3]
        change(copied / name, rng)
        target.refuses(copied, error=DamagedCheckpointError)
        shutil.copyfile(saved / name, copied / name)
    assert load_from(copied, *small()).step == 7


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_longer_or_something_else(
    saved: Path, copied: Path, target: Target, name: str, tmp_path: Path
) -> None:
    with open(copied / name, "ab") as file:
        file.write(b"\0")
    target.refuses(copied, error=DamagedCheckpointError)
    (copied / name).unlink()
    if name != MANIFEST:  # without it nothing says that this is a checkpoint, but its name
        target.refuses(copied, error=DamagedCheckpointError)
    target.refuses(tmp_path, error=DamagedCheckpointError)
    (copied / name).symlink_to(saved / name)
    target.refuses(copied, error=DamagedCheckpointError)
    (copied / name).unlink()
    os.mkfifo(copied / name)
    target.refuses(copied, error=DamagedCheckpointError)
    (copied / name).unlink()
    (copied / name).mkdir()
    target.refuses(copied, error=DamagedCheckpointError)


def test_a_renamed_checkpoint(copied: Path, target: Target) -> None:
    moved = copied.with_name("step-000000000008")
    copied.rename(moved)
    target.refuses(moved, "holds step 7", DamagedCheckpointError)
    moved.rename(copied.with_name("best"))
    assert load_from(copied.with_name("best"), *small()).step == 7


def test_the_one_before_a_damaged_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = small()
    first = instep.save(tmp_path, *loop, step=1)
    kept = list(everything(*loop))
    learn_once(loop)
    second = instep.save(tmp_path, *loop, step=2)
    flip(second / "rank-00000.safetensors", random.Random(0))
    with caplog.at_level(logging.WARNING, "instep"):
        assert load_from(tmp_path, *loop).path == first
    require_same(kept, loop, "the one before")
    assert "is not what was saved" in caplog.text
    with pytest.raises(DamagedCheckpointError):
        instep.load(second, *loop)
    flip(first / MANIFEST, random.Random(0))
    with pytest.raises(DamagedCheckpointError, match="none of the 2 checkpoints"):
        instep.load(tmp_path, *loop)
    # Training goes on from the first, and passes the damaged one.
    assert instep.save(tmp_path, *loop, step=1).name == "step-000000000001.1"
    assert load_from(tmp_path, *loop).step == 1
    assert instep.save(tmp_path, *loop, step=2).name == "step-000000000002.1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000000001.1", "step-000000000002.1"]


def learn_once(loop: Any) -> None:
    for p in loop[0].parameters():
        p.grad = torch.rand_like(p)
    loop[1].step()


# What is signed, and says something else.


def manifest_of(path: Path) -> Any:
    return json.loads((path / MANIFEST).read_bytes())


CRAFTED: dict[str, Callable[[Any], Any]] = {
    "another format": lambda m: m.update(format="x"),
    "a negative version": lambda m: m.update(version=-1),
    "no step": lambda m: m.pop("step"),
    "more than there is": lambda m: m.update(code="import os"),
    "a path out of the directory": lambda m: renamed_file(m, "../rank-00000.safetensors"),
    "an absolute path": lambda m: renamed_file(m, "/etc/passwd"),
    "a path with an end": lambda m: renamed_file(m, "rank-00000.safetensors\0"),
    "another file": lambda m: renamed_file(m, "manifest.json"),
    "a huge tensor": lambda m: m["tensors"]["model/inner.weight"].update(shape=[2**40, 2**20]),
    "a huge chunk": lambda m: m["tensors"]["model/inner.weight"]["chunks"][0].__setitem__(2, [2**62, 2**62]),
    "a negative size": lambda m: m["tensors"]["model/inner.weight"].update(shape=[-3, -4]),
    "no chunks": lambda m: m["tensors"]["model/inner.weight"].update(chunks=[]),
    "a chunk twice": lambda m: m["tensors"]["model/inner.weight"]["chunks"].extend(
        m["tensors"]["model/inner.weight"]["chunks"]
    ),
    "an unknown dtype": lambda m: m["tensors"]["model/inner.weight"].update(dtype="object"),
    "another dtype": lambda m: m["tensors"]["model/inner.weight"].update(dtype="int32"),
    "another key": lambda m: whole(m)["parameters"].update({"inner.weight": ["inner.bias"]}),
    "a class": lambda m: whole(m)["optimizers"][0].update({"class": "os.system"}),
    "an unknown kind of value": lambda m: m["extra"].__setitem__(0, {"pickle": "gASVBQAAAAAAAABLAS4="}),
    "a tensor that is not there": lambda m: m["extra"].__setitem__(0, {"tensor": "x"}),
    "the same tensor twice": lambda m: m["extra"].__setitem__(0, 2 * [{"tensor": "extra/0['rng']"}]),
    "a weight as a value": lambda m: m["extra"].__setitem__(0, {"tensor": "model/inner.weight"}),
    "no base64": lambda m: m["extra"].__setitem__(0, {"bytes": "*"}),
    "a list as a key": lambda m: m["extra"].__setitem__(0, {"dict": [[[], 1]]}),
    "a deep value": lambda m: m["extra"].__setitem__(0, deep(40)),
    "a negative learning rate": lambda m: group(m).update(lr=-1.0),
    "an infinite learning rate": lambda m: group(m).update(lr={"float": "inf"}),
    "a learning rate in words": lambda m: group(m).update(lr="0.1"),
    "more betas": lambda m: group(m).update(betas={"tuple": [0.9, 0.9, 0.9]}),
    "parameters among the values": lambda m: group(m).update(params=[]),
    "a parameter in no group": lambda m: whole(m)["optimizers"][0]["groups"][0]["parameters"].pop(),
    "state of another's shape": lambda m: state(m).update(exp_avg={"tensor": "extra/0['rng']"}),
    "state that is no state": lambda m: whole(m)["optimizers"][0]["state"].update({"inner.weight": 1}),
    "shared state that is none": lambda m: whole(m)["optimizers"][0].update(shared=1),
    "a previous norm in words": lambda m: whole(m).update(previous_norms=["x"]),
    "no draws": lambda m: whole(m).pop("draws"),
    "draws that are none": lambda m: whole(m).update(draws=[1]),
    "draws without a step": lambda m: whole(m).update(draws=[{"seed": 1}]),
    "draws of a step below zero": lambda m: whole(m).update(draws=[{"seed": 1, "step": -1}]),
    "no model": lambda m: m["models"].clear(),
    "a model twice": lambda m: m["models"].append(whole(m)),
    "a model that is none": lambda m: m.update(models=[1]),
    "a stage in the place of the model": lambda m: whole(m).update(stages=[0]),
    "a stage that is not there": lambda m: whole(m).update(stages=[1]),
    "a stage twice": lambda m: whole(m).update(stages=[0, 0]),
    "a stage below zero": lambda m: whole(m).update(stages=[-1]),
    "a stage in words": lambda m: whole(m).update(stages=["0"]),
    "a stage beside the model": lambda m: m["models"].append({**whole(m), "stages": [0]}),
}


def renamed_file(m: Any, name: str) -> None:
    m["files"][name] = m["files"].pop("rank-00000.safetensors")
    for tensor in m["tensors"].values():
        tensor["chunks"][0][0] = name


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def whole(m: Any) -> Any:
    """The only model."""
    return m["models"][0]


def group(m: Any) -> Any:
    return whole(m)["optimizers"][0]["groups"][0]["values"]


def state(m: Any) -> Any:
    return whole(m)["optimizers"][0]["state"]["inner.weight"]


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_manifests(copied: Path, target: Target, name: str) -> None:
    manifest = manifest_of(copied)
    CRAFTED[name](manifest)
    sign(copied, manifest)
    target.refuses(copied)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"null", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"step":1,"step":2}', b"NaN", b"1e999"),
        *(b"1" * 5000, b"\xff", b'"\xc3\xa9"', b"{", b'{"format": "instep checkpoint", "version": 1}'),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_manifests_that_are_none(copied: Path, target: Target, text: bytes) -> None:
    sign(copied, text)
    target.refuses(copied, error=DamagedCheckpointError)


def test_a_later_version_is_not_taken_for_damage(copied: Path, target: Target) -> None:
    sign(copied, {**manifest_of(copied), "version": 4})
    assert not isinstance(target.refuses(copied, "update instep"), DamagedCheckpointError)


def test_earlier_versions_are_loaded(copied: Path, target: Target) -> None:
    """The second had one model, and did not call it one; the first said nothing of draws."""
    manifest = manifest_of(copied)
    (model,) = manifest.pop("models")
    assert model.pop("stages") == []
    sign(copied, {**manifest, **model, "version": 2})
    assert instep.load(copied, *small(seed=2)) is not None
    sign(copied, {**manifest, **model, "version": 3})
    target.refuses(copied, "the manifest does not have the keys", DamagedCheckpointError)
    del model["draws"]
    sign(copied, {**manifest, **model, "version": 1})
    assert instep.load(copied, *small(seed=2)) is not None
    sign(copied, {**manifest, **model, "version": 2})
    target.refuses(copied, "draws", DamagedCheckpointError)


def test_a_manifest_that_is_too_long(copied: Path, target: Target) -> None:
    os.truncate(copied / MANIFEST, 65 * 1024 * 1024)
    target.refuses(copied, "more than", DamagedCheckpointError)


def test_values_that_are_not_finite(tmp_path: Path, target: Target) -> None:
    for name in ("parameter", "state"):
        loop = small()
        tensor = loop[0].outer.bias
        tensor = tensor if name == "parameter" else loop[1].state[tensor]["exp_avg"]
        with torch.no_grad():
            tensor[0] = float("nan")
        with pytest.raises(CheckpointError, match=r"outer\.bias.* is not finite"):
            instep.save(tmp_path / name, *loop, step=1)
        assert list((tmp_path / name).iterdir()) == []
        instep.save(tmp_path / name, *loop, step=1, allow_nonfinite=True)
        error = target.refuses(tmp_path / name, r"outer\.bias.* is not finite")
        assert not isinstance(error, DamagedCheckpointError), "the one before is no better"
        other = small(seed=2)
        instep.load(tmp_path / name, *other, allow_nonfinite=True)
        require_same(loop, other, "asked for")


# Drawn at random.


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places_in(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places_in(item, (*path, i))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 1e308, 0.5, "", "x", "float32", "rank-00000.safetensors", "nan"]),
    st.sampled_from([[], {}, [[]], [0], {"tensor": "model/norm.num_batches_tracked"}, {"tuple": []}, {"dict": [[1]]}]),
)


def mutate(data: st.DataObject, manifest: Any) -> Any:
    path = data.draw(st.sampled_from(list(places_in(manifest))))
    if not path:
        return data.draw(VALUES)
    inner = manifest
    for step in path[:-1]:
        inner = inner[step]
    others = [p for p in places_in(manifest) if p]
    match data.draw(st.sampled_from(["replace", "remove", "copy", "swap"])):
        case "replace":
            inner[path[-1]] = data.draw(VALUES)
        case "remove":
            del inner[path[-1]]
        case "copy":
            inner[path[-1]] = copy.deepcopy(at(manifest, data.draw(st.sampled_from(others))))
        case "swap" if isinstance(inner, dict):
            inner[data.draw(st.text(max_size=3))] = inner.pop(path[-1])
        case _:
            inner.append(data.draw(VALUES)) if isinstance(inner, list) else None
    return manifest


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def mutated_schemas(saved: Path, work: Path, target: Target, data: st.DataObject) -> None:
    manifest = manifest_of(saved)
    for _ in range(data.draw(st.integers(1, 3))):
        if isinstance(manifest, dict):
            manifest = mutate(data, manifest)
    sign(work, manifest)
    target.loads_or_refuses(work)


SETTINGS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=60, derandomize=True, **SETTINGS)
@given(data=st.data())
def test_mutated_schemas_raise_nothing_else(saved: Path, copied: Path, target: Target, data: st.DataObject) -> None:
    mutated_schemas(saved, copied, target, data)


@pytest.mark.nightly
@settings(max_examples=2000, **SETTINGS)
@given(data=st.data())
def test_more_mutated_schemas(saved: Path, copied: Path, target: Target, data: st.DataObject) -> None:
    mutated_schemas(saved, copied, target, data)


def resigned(saved: Path, work: Path, target: Target, data: st.DataObject) -> None:
    """A file of tensors that somebody has changed, header or content, and whose digest is right."""
    content = bytearray((saved / FILES[2]).read_bytes())
    header = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header + 40))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from([len(content), len(content) - 1, 8, header]))]
    (work / FILES[2]).write_bytes(content)
    manifest = manifest_of(saved)
    manifest["files"][FILES[2]] = {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    sign(work, manifest)
    target.loads_or_refuses(work)


@settings(max_examples=40, derandomize=True, **SETTINGS)
@given(data=st.data())
def test_mutated_files_raise_nothing_else(saved: Path, copied: Path, target: Target, data: st.DataObject) -> None:
    resigned(saved, copied, target, data)


@pytest.mark.nightly
@settings(max_examples=2000, **SETTINGS)
@given(data=st.data())
def test_more_mutated_files(saved: Path, copied: Path, target: Target, data: st.DataObject) -> None:
    resigned(saved, copied, target, data)


@settings(max_examples=200, derandomize=True, **SETTINGS)
@given(data=st.data())
def test_tilings_are_told_from_what_is_none(data: st.DataObject) -> None:
    """Against counting how often each element is covered."""
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = split(data, Box((0,) * len(shape), shape), 2)
    for _ in range(data.draw(st.integers(0, 2))):
        box = boxes[data.draw(st.integers(0, len(boxes) - 1))]
        offset = tuple(max(0, o + data.draw(st.integers(-1, 1))) for o in box.offset)
        size = tuple(max(0, s + data.draw(st.integers(-1, 1))) for s in box.shape)
        boxes.append(Box(offset, size)) if data.draw(st.booleans()) else boxes.remove(box)
        if not boxes:
            break
    covered = torch.zeros([size + 6 for size in shape], dtype=torch.int64)
    for box in boxes:
        covered[box.within(Box((0,) * len(shape), shape))] += 1
    inside = covered[tuple(slice(size) for size in shape)]
    right = bool((inside == 1).all()) and int(covered.sum()) == math.prod(shape)
    assert cover_once(boxes, shape) == right


def split(data: st.DataObject, box: Box, times: int) -> list[Box]:
    if not times or not box.shape:
        return [box]
    d = data.draw(st.integers(0, len(box.shape) - 1))
    at = data.draw(st.integers(0, box.shape[d]))
    first = Box(box.offset, (*box.shape[:d], at, *box.shape[d + 1 :]))
    second = Box(
        (*box.offset[:d], box.offset[d] + at, *box.offset[d + 1 :]),
        (*box.shape[:d], box.shape[d] - at, *box.shape[d + 1 :]),
    )
    return [*split(data, first, times - 1), *split(data, second, times - 1)]


def test_nothing_is_run_or_imported(copied: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pickle nor the import system is asked for anything that a checkpoint names."""
    find = importlib.import_module

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a checkpoint made something run")

    def only_ours(name: str) -> object:
        if name != "instep.checkpoint":
            never()
        return find(name)

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(importlib, "import_module", only_ours)
    assert load_from(copied, *small()).step == 7
    manifest = manifest_of(copied)
    whole(manifest)["optimizers"][0]["class"] = "antigravity.AdamW"
    sign(copied, manifest)
    target.refuses(copied, "antigravity")
