"""``manifest.json``: what a checkpoint holds. Read as something that anybody may have written."""

import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from instep._optim.dtensor import is_sharded, spread
from instep._version import __version__
from instep.checkpoint.files import DIGEST, DTYPES, MANIFEST, FileRecord, digest_line, read_small
from instep.checkpoint.values import Json
from instep.errors import CheckpointError, DamagedCheckpointError

# Boxes in a tensor: what a chunk covers, and whether chunks cover all of it once.


_MOST_DIVIDED = 6


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and its size there."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def common(self, other: "Box") -> "Box | None":
        """What both cover; ``None`` if nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        stops = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where it is in ``outer``, as an index."""
        starts = (a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def cover_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether ``boxes`` cover every element of a tensor of ``shape`` exactly once, and nothing outside.

    By their corners: counted with the sign of the corner, those of a tiling cancel out, up to the whole's own. (The
    mixed derivative of how often a point is covered; it tells two different coverings apart.)
    """
    outer = whole(shape)
    boxes = [box for box in boxes if box.numel]
    if not outer.numel:
        return not boxes
    divided = [d for d, size in enumerate(shape) if any((box.offset[d], box.shape[d]) != (0, size) for box in boxes)]
    if not divided:
        return len(boxes) == 1
    if len(divided) > _MOST_DIVIDED:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(-1, outer), *((1, box) for box in boxes)]:
        for ends in product((0, 1), repeat=len(divided)):
            corner = tuple(box.offset[d] + end * box.shape[d] for d, end in zip(divided, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return not any(corners.values())


# Tensors that are spread over ranks (``DTensor``): which part of one is this rank's, and how a new one is laid out.


def local_of(tensor: Any) -> torch.Tensor:
    """What this rank has of it, in the same memory."""
    local: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor.detach()
    return local


def box_of(tensor: Any) -> Box:
    """Which part of the whole that is."""
    if not is_sharded(tensor):
        return whole(tensor.shape)
    # As torch.distributed.checkpoint asks for it (torch/distributed/_checkpointable.py).
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def without_sums(tensor: Any) -> Any:
    """A ``DTensor`` of which no rank has only a summand. All ranks must call this."""
    if not is_sharded(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return tensor.redistribute(placements=[replicate if p.is_partial() else p for p in tensor.placements])


def empty_beside(parameter: Any, shape: Sequence[int], dtype: torch.dtype, *, in_host_memory: bool) -> Any:
    """A new ``DTensor`` on the mesh of ``parameter``: spread as that is if of its shape, else whole on each rank."""
    if tuple(shape) == tuple(parameter.shape):
        if in_host_memory:
            local = torch.empty_like(parameter._local_tensor, dtype=dtype, device="cpu", pin_memory=True)
            return spread(local, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    tensor: Any = sys.modules["torch.distributed.tensor"]
    local = torch.empty(shape, dtype=dtype, device=parameter._local_tensor.device)
    mesh = parameter.device_mesh
    return spread(local, mesh, [tensor.Replicate()] * mesh.ndim, local.shape, local.stride())


# ``param_groups`` of a checkpoint: whether they fit an optimizer's, and are sane.


# torch's own optimizers refuse others.
_NOT_NEGATIVE = ("lr", "initial_lr", "weight_decay", "momentum")


def check_values(where: str, current: Mapping[str, Any], saved: Mapping[str, Any], *, allow_nonfinite: bool) -> None:
    """Raise ``CheckpointError`` unless ``saved`` could be the values of the group that has ``current``."""
    for key, value in saved.items():
        for number in _numbers(value):
            if not allow_nonfinite and not math.isfinite(number) and not _nonfinite(current.get(key)):
                raise CheckpointError(f"{where}[{key!r}] is {value!r} in the checkpoint, which is not finite")
            if key in _NOT_NEGATIVE and number < 0:
                raise CheckpointError(f"{where}[{key!r}] is {value!r} in the checkpoint, which is negative")
        if key in current and not _alike(current[key], value):
            raise CheckpointError(
                f"{where}[{key!r}] is {value!r} in the checkpoint and {current[key]!r} in the optimizer"
            )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            yield float(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _nonfinite(value: Any) -> bool:
    return any(not math.isfinite(number) for number in _numbers(value))


def _alike(current: Any, saved: Any) -> bool:
    if current is None or saved is None:
        return True
    if isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(current) == len(saved) and all(map(_alike, current, saved))
    if _is_number(current) and _is_number(saved):
        return True
    return type(current) is type(saved)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ``manifest.json``: what a checkpoint holds. Read as something that anybody may have written.


FORMAT, VERSION = "instep checkpoint", 2
LARGEST = 64 * 1024 * 1024
_MOST_DIMENSIONS = 64
_NAMED: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_FILE = re.compile(r"rank-\d{5,9}\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor, which lies in chunks in one file or several, in each under the tensor's key."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One of ``param_groups``, with the names of its parameters."""

    parameters: tuple[str, ...]
    values: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One optimizer.

    Attributes:
        cls: module and qualified name of its class, to be compared. It is never imported.
        state: encoded, by the names of the parameters.
        shared: encoded: what is in ``state`` and belongs to no parameter.
    """

    cls: str
    groups: tuple[GroupRecord, ...]
    state: Mapping[str, Mapping[str, Json]]
    shared: Json


@dataclass(frozen=True, slots=True)
class DrawsRecord:
    """Of an attachment with ``random="keyed"``: its seed, and the number of its next step."""

    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        parameters: all names of each parameter, by its own.
        buffers: the same of buffers.
        previous_norms: encoded: the norm of the last step's gradients, of each attachment that clips by it.
        draws: of each attachment; ``None``: it has no keys.
        extra: encoded, of each rank.
        tensors: by their keys. That of a parameter or buffer is ``model/`` and its name.
    """

    step: int
    world_size: int
    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, tuple[str, ...]]
    optimizers: tuple[OptimizerRecord, ...]
    previous_norms: tuple[Json, ...]
    draws: tuple[DrawsRecord | None, ...]
    extra: tuple[Json, ...]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """As the file has it. ``CheckpointError`` if it would be too long to be read again."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "made_with": {"instep": __version__, "torch": str(torch.__version__)},
            "step": self.step,
            "world_size": self.world_size,
            "parameters": self.parameters,
            "buffers": self.buffers,
            "optimizers": [
                {
                    "class": optimizer.cls,
                    "groups": [{"parameters": g.parameters, "values": g.values} for g in optimizer.groups],
                    "state": optimizer.state,
                    "shared": optimizer.shared,
                }
                for optimizer in self.optimizers
            ],
            "previous_norms": self.previous_norms,
            "draws": [None if one is None else asdict(one) for one in self.draws],
            "extra": self.extra,
            "tensors": {
                key: {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": tensor.shape,
                    "chunks": [[file, box.offset, box.shape] for file, box in tensor.chunks],
                }
                for key, tensor in self.tensors.items()
            },
            "files": {name: asdict(file) for name, file in self.files.items()},
        }
        text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
        if len(text) > LARGEST:
            raise CheckpointError(
                f"the manifest would have {len(text)} bytes, more than the {LARGEST} that are read again. Put long "
                "lists in extra= into tensors"
            )
        return text


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def digest_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def read(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``.

    Raises:
        DamagedCheckpointError: it is not what was written, or does not say what a manifest says.
        CheckpointError: it is of a later version.
    """
    text = read_small(directory / MANIFEST, LARGEST)
    if read_small(directory / DIGEST, 1024) != digest_line(digest_of(text)):
        raise DamagedCheckpointError(f"{directory / MANIFEST} is not what was saved: {DIGEST} has another SHA-256")
    try:
        return _parsed(_json(text), directory)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{directory / MANIFEST}: {error}") from error


def _json(text: bytes) -> Json:
    try:
        return json.loads(
            text.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"it is not JSON: {str(error)[:200]}") from error


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DamagedCheckpointError("an object has the same key twice")
    return found


def _no_constant(name: str) -> Json:
    raise DamagedCheckpointError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise DamagedCheckpointError(f"the number {text[:40]} is too large")
    return value


_DRAWS_SINCE = 2
"""The version of the format that had them first."""
_KEYS = (
    "format",
    "version",
    "made_with",
    "step",
    "world_size",
    "parameters",
    "buffers",
    "optimizers",
    "previous_norms",
    "draws",
    "extra",
    "tensors",
    "files",
)


def _parsed(content: Json, directory: Path) -> Manifest:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpointError(f"it is not of the format {FORMAT!r}")
    version = _count(content.get("version"), "version")
    if version > VERSION:
        raise CheckpointError(
            f"{directory} was saved in version {version} of the format, and this instep reads up to {VERSION}: "
            "update instep"
        )
    if version < _DRAWS_SINCE:
        content = {"draws": [], **content}
    _keys(content, _KEYS, "the manifest")
    files = {name: _file(name, record) for name, record in _object(content["files"], "files").items()}
    tensors = {key: _tensor(key, record, files) for key, record in _object(content["tensors"], "tensors").items()}
    parameters = _names(content["parameters"], "parameters", tensors)
    buffers = _names(content["buffers"], "buffers", tensors)
    if parameters.keys() & buffers.keys():
        raise DamagedCheckpointError("a name is that of a parameter and of a buffer")
    world_size = _count(content["world_size"], "world_size")
    extra = _array(content["extra"], "extra")
    if world_size != len(extra):
        raise DamagedCheckpointError(f"extra has {len(extra)} values for world_size {world_size}")
    optimizers = tuple(_optimizer(one, parameters) for one in _array(content["optimizers"], "optimizers"))
    return Manifest(
        _count(content["step"], "step"),
        world_size,
        parameters,
        buffers,
        optimizers,
        tuple(_array(content["previous_norms"], "previous_norms")),
        tuple(None if one is None else _draws(one) for one in _array(content["draws"], "draws")),
        tuple(extra),
        tensors,
        files,
    )


def _file(name: str, record: Json) -> FileRecord:
    # No path: a checkpoint's files are in its own directory.
    if not _FILE.fullmatch(name):
        raise DamagedCheckpointError(f"a file is called {name[:80]!r}")
    _keys(record, ("size", "sha256"), f"file {name}")
    digest = record["sha256"]
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise DamagedCheckpointError(f"the SHA-256 of {name} is none")
    return FileRecord(_count(record["size"], f"the size of {name}"), digest)


def _tensor(key: str, record: Json, files: Mapping[str, FileRecord]) -> TensorRecord:
    where = f"tensor {key[:200]!r}"
    _keys(record, ("dtype", "shape", "chunks"), where)
    dtype = _NAMED.get(record["dtype"]) if isinstance(record["dtype"], str) else None
    if dtype is None:
        raise DamagedCheckpointError(f"the dtype of {where} is not known")
    shape = _sizes(record["shape"], where)
    chunks = []
    for chunk in _array(record["chunks"], where):
        if not isinstance(chunk, list) or len(chunk) != 3 or not isinstance(chunk[0], str) or chunk[0] not in files:
            raise DamagedCheckpointError(f"a chunk of {where} is in no file")
        box = Box(_sizes(chunk[1], where), _sizes(chunk[2], where))
        if len(box.offset) != len(shape) or len(box.shape) != len(shape):
            raise DamagedCheckpointError(f"a chunk of {where} has other dimensions")
        if box.numel * dtype.itemsize > files[chunk[0]].size:
            raise DamagedCheckpointError(f"a chunk of {where} is larger than its file")
        chunks.append((chunk[0], box))
    if len({file for file, _ in chunks}) < len(chunks) or not cover_once([box for _, box in chunks], shape):
        raise DamagedCheckpointError(f"the chunks of {where} do not make up all of it, once")
    return TensorRecord(dtype, shape, tuple(chunks))


def _names(content: Json, where: str, tensors: Mapping[str, TensorRecord]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, names in _object(content, where).items():
        names = _strings(names, where)
        if not names or names[0] != name or f"model/{name}" not in tensors:
            raise DamagedCheckpointError(f"{name[:200]!r} of {where} has no name or no tensor")
        found[name] = names
    everything = [name for names in found.values() for name in names]
    if len(set(everything)) < len(everything):
        raise DamagedCheckpointError(f"two of {where} have the same name")
    return found


def _optimizer(content: Json, parameters: Mapping[str, tuple[str, ...]]) -> OptimizerRecord:
    _keys(content, ("class", "groups", "state", "shared"), "an optimizer")
    if not isinstance(content["class"], str):
        raise DamagedCheckpointError("the class of an optimizer is no name")
    groups = []
    for group in _array(content["groups"], "groups"):
        _keys(group, ("parameters", "values"), "a group")
        values = _object(group["values"], "the values of a group")
        groups.append(GroupRecord(_strings(group["parameters"], "a group"), values))
    members = [name for group in groups for name in group.parameters]
    if len(set(members)) < len(members) or not parameters.keys() >= set(members):
        raise DamagedCheckpointError("the groups of an optimizer hold a parameter twice, or one that is not there")
    state = {name: _object(entry, "state") for name, entry in _object(content["state"], "state").items()}
    if not set(members) >= state.keys():
        raise DamagedCheckpointError("the state of an optimizer is of parameters that are not its own")
    return OptimizerRecord(content["class"], tuple(groups), state, content["shared"])


def _draws(content: Json) -> DrawsRecord:
    _keys(content, ("seed", "step"), "draws")
    return DrawsRecord(_count(content["seed"], "a seed"), _count(content["step"], "the number of a step"))


def _keys(content: Json, keys: Iterable[str], where: str) -> None:
    if not isinstance(content, dict) or set(content) != set(keys):
        raise DamagedCheckpointError(f"{where} does not have the keys {', '.join(keys)}")


def _object(content: Json, where: str) -> dict[str, Json]:
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"{where} is no object")
    return content


def _array(content: Json, where: str) -> list[Json]:
    if not isinstance(content, list):
        raise DamagedCheckpointError(f"{where} is no array")
    return content


def _strings(content: Json, where: str) -> tuple[str, ...]:
    if not all(isinstance(item, str) for item in _array(content, where)):
        raise DamagedCheckpointError(f"{where} has names that are none")
    return tuple(content)


def _count(value: Json, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise DamagedCheckpointError(f"{where} is no count")
    return value


def _sizes(content: Json, where: str) -> tuple[int, ...]:
    sizes = tuple(_count(size, f"a size of {where}") for size in _array(content, where))
    if len(sizes) > _MOST_DIMENSIONS or math.prod(size for size in sizes if size) >= 2**63:
        raise DamagedCheckpointError(f"{where} is too large")
    return sizes
