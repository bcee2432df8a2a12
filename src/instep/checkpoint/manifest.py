"""``manifest.json``: what a checkpoint holds, but for the elements of its tensors.

``save`` makes a ``Manifest``, and ``to_bytes`` of it is the file. ``read`` makes the same ``Manifest`` again. The file
may have been written by anybody, so ``read`` trusts none of it: every type, name, size and reference is looked at
before it is used, and a file with one wrong is a ``DamagedCheckpointError``. Nothing in it is ever run or imported.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from instep._version import __version__
from instep.checkpoint.boxes import Box, cover_once
from instep.checkpoint.files import DIGEST, DTYPES, MANIFEST, FileRecord, digest_line, read_small
from instep.checkpoint.values import Json
from instep.errors import CheckpointError, DamagedCheckpointError

FORMAT, VERSION = "instep checkpoint", 3
_DRAWS_SINCE, _MODELS_SINCE = 2, 3
"""The versions of the format that had ``draws``, and several models, first."""
LARGEST = 64 * 1024 * 1024
"""So many bytes of a manifest are read, and no more are written."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor, which lies in chunks, each in a file of its own under the tensor's key.

    Attributes:
        chunks: the name of each file, with the box of the tensor that is in it.
    """

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
        state: the state of each parameter, encoded, by the parameter's name.
        shared: the state that belongs to no parameter, encoded.
    """

    cls: str
    groups: tuple[GroupRecord, ...]
    state: Mapping[str, Mapping[str, Json]]
    shared: Json


@dataclass(frozen=True, slots=True)
class DrawsRecord:
    """The seed of an attachment with ``random="keyed"``, and the number of its next step."""

    seed: int
    step: int


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that all ranks have, with its optimizers; or the stages of a pipeline that some of the ranks have.

    Attributes:
        stages: their places in the pipeline, the first first; empty: a whole model.
        parameters: all names of each parameter, by its own.
        buffers: the same of buffers.
        previous_norms: for each attachment, encoded: the norm of the last step's gradients, if it clips by that.
        draws: for each attachment; ``None``: it is not ``random="keyed"``.
    """

    stages: tuple[int, ...]
    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, tuple[str, ...]]
    optimizers: tuple[OptimizerRecord, ...]
    previous_norms: tuple[Json, ...]
    draws: tuple[DrawsRecord | None, ...]


def key_prefix(stages: Iterable[int]) -> str:
    """The beginning of the keys of a model's tensors: stages of a pipeline often have the same names."""
    places = "-".join(map(str, stages))
    return f"stages/{places}/" if places else ""


_OF_A_MODEL = re.compile(r"(stages/\d+(-\d+)*/)?model/")


def is_of_a_model(key: str) -> bool:
    """Whether the key is that of a parameter or buffer, which are read by their names alone."""
    return _OF_A_MODEL.match(key) is not None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one checkpoint. Values of Python are encoded (``instep.checkpoint.values``), and refer to tensors
    by their keys.

    Attributes:
        models: one; or several, which are all stages of a pipeline, each once.
        extra: for each rank, encoded.
        tensors: by their keys. The key of a parameter or buffer is ``model/`` and its name, after ``key_prefix``.
        files: by their names.
    """

    step: int
    world_size: int
    models: tuple[ModelRecord, ...]
    extra: tuple[Json, ...]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """The content of the file. ``CheckpointError`` if it would be too long to be read again."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "made_with": {"instep": __version__, "torch": str(torch.__version__)},
            "step": self.step,
            "world_size": self.world_size,
            "models": [_content(model) for model in self.models],
            "extra": self.extra,
            "tensors": {
                key: {
                    "dtype": dtype_name(tensor.dtype),
                    "shape": tensor.shape,
                    "chunks": [[file, box.offset, box.shape] for file, box in tensor.chunks],
                }
                for key, tensor in self.tensors.items()
            },
            "files": {name: asdict(file) for name, file in self.files.items()},
        }
        # Floats that are not finite were encoded as strings, so none is left: JSON has no word for them.
        text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
        if len(text) > LARGEST:
            raise CheckpointError(
                f"the manifest would have {len(text)} bytes, more than the {LARGEST} that are read again. Put long "
                "lists in extra= into tensors"
            )
        return text


def _content(model: ModelRecord) -> dict[str, Any]:
    return {
        "stages": model.stages,
        "parameters": model.parameters,
        "buffers": model.buffers,
        "optimizers": [
            {
                "class": optimizer.cls,
                "groups": [{"parameters": g.parameters, "values": g.values} for g in optimizer.groups],
                "state": optimizer.state,
                "shared": optimizer.shared,
            }
            for optimizer in model.optimizers
        ],
        "previous_norms": model.previous_norms,
        "draws": [None if one is None else asdict(one) for one in model.draws],
    }


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


_FILE = re.compile(r"rank-\d{5,9}\.safetensors")


def dtype_name(dtype: torch.dtype) -> str:
    """The name that the manifest has for ``dtype``."""
    return str(dtype).removeprefix("torch.")


DTYPE_OF_NAME: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in DTYPES}


def digest_of(text: bytes) -> str:
    """The SHA-256 of a manifest, which stands in a file beside it."""
    return hashlib.sha256(text).hexdigest()


def read(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``.

    Raises:
        DamagedCheckpointError: the file is not what was written, or is no manifest.
        CheckpointError: the file is of a later version of the format.
    """
    text = read_small(directory / MANIFEST, LARGEST)
    if read_small(directory / DIGEST, 1024) != digest_line(digest_of(text)):
        raise DamagedCheckpointError(f"{directory / MANIFEST} is not what was saved: {DIGEST} has another SHA-256")
    try:
        return _parsed(_json(text), directory)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{directory / MANIFEST}: {error}") from error


def _json(text: bytes) -> Json:
    """The value of JSON as ``to_bytes`` writes it: without NaN and infinity, and without a key twice, of which Python
    would take the last one."""
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


_KEYS = ("format", "version", "made_with", "step", "world_size", "models", "extra", "tensors", "files")
_KEYS_OF_A_MODEL = ("stages", "parameters", "buffers", "optimizers", "previous_norms", "draws")


def _parsed(content: Json, directory: Path) -> Manifest:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpointError(f"it is not of the format {FORMAT!r}")
    # Before anything else is looked at: a later version may have it in another form.
    version = _count(content.get("version"), "version")
    if version > VERSION:
        raise CheckpointError(
            f"{directory} was saved in version {version} of the format, and this instep reads up to {VERSION}: "
            "update instep"
        )
    # Version 1 had no draws. An empty list says nothing about any attachment, so each goes on from its own.
    if version < _DRAWS_SINCE:
        content = {"draws": [], **content}
    if version < _MODELS_SINCE:
        model = {key: content.pop(key) for key in _KEYS_OF_A_MODEL if key in content}
        content = {"models": [{"stages": [], **model}], **content}
    _keys(content, _KEYS, "the manifest")
    # In this order: tensors refer to files, parameters to tensors, and optimizers to parameters.
    files = {name: _file(name, record) for name, record in _object(content["files"], "files").items()}
    tensors = {key: _tensor(key, record, files) for key, record in _object(content["tensors"], "tensors").items()}
    models = tuple(_model(record, tensors) for record in _array(content["models"], "models"))
    # So no stage is there twice, or missing, and a whole model is alone.
    if sorted(place for model in models for place in model.stages) != list(range(sum(len(m.stages) for m in models))):
        raise DamagedCheckpointError("its models are not all stages of a pipeline, each once")
    if not models or (len(models) > 1 and not all(model.stages for model in models)):
        raise DamagedCheckpointError("it is of no model, or of several")
    world_size = _count(content["world_size"], "world_size")
    extra = _array(content["extra"], "extra")
    if world_size != len(extra):
        raise DamagedCheckpointError(f"extra has {len(extra)} values for world_size {world_size}")
    return Manifest(_count(content["step"], "step"), world_size, models, tuple(extra), tensors, files)


def _model(record: Json, tensors: Mapping[str, TensorRecord]) -> ModelRecord:
    _keys(record, _KEYS_OF_A_MODEL, "a model")
    stages = tuple(_count(place, "a stage") for place in _array(record["stages"], "stages"))
    prefix = key_prefix(stages)
    parameters = _names(record["parameters"], "parameters", prefix, tensors)
    buffers = _names(record["buffers"], "buffers", prefix, tensors)
    if parameters.keys() & buffers.keys():
        raise DamagedCheckpointError("a name is that of a parameter and of a buffer")
    return ModelRecord(
        stages,
        parameters,
        buffers,
        tuple(_optimizer(one, parameters) for one in _array(record["optimizers"], "optimizers")),
        tuple(_array(record["previous_norms"], "previous_norms")),
        tuple(None if one is None else _draws(one) for one in _array(record["draws"], "draws")),
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
    dtype = DTYPE_OF_NAME.get(record["dtype"]) if isinstance(record["dtype"], str) else None
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
        # Or else a small file could make ``load`` ask for any amount of memory.
        if box.numel * dtype.itemsize > files[chunk[0]].size:
            raise DamagedCheckpointError(f"a chunk of {where} is larger than its file")
        chunks.append((chunk[0], box))
    # A file has one chunk of a tensor, under its key.
    if len({file for file, _ in chunks}) < len(chunks) or not cover_once([box for _, box in chunks], shape):
        raise DamagedCheckpointError(f"the chunks of {where} do not make up all of it, once")
    return TensorRecord(dtype, shape, tuple(chunks))


def _names(content: Json, where: str, prefix: str, tensors: Mapping[str, TensorRecord]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, names in _object(content, where).items():
        names = _strings(names, where)
        if not names or names[0] != name or f"{prefix}model/{name}" not in tensors:
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
    # Not all of them: a parameter that was never stepped has no state.
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
    # To Python a bool is an int. torch's sizes have 64 bits.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise DamagedCheckpointError(f"{where} is no count")
    return value


_MOST_DIMENSIONS = 64


def _sizes(content: Json, where: str) -> tuple[int, ...]:
    """A shape, or an offset. The product of the sizes is bounded too, zeros left out: torch computes strides of it."""
    sizes = tuple(_count(size, f"a size of {where}") for size in _array(content, where))
    if len(sizes) > _MOST_DIMENSIONS or math.prod(size for size in sizes if size) >= 2**63:
        raise DamagedCheckpointError(f"{where} is too large")
    return sizes
