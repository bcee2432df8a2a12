"""Nested Python values as JSON, and back: ``extra``, the values of groups, the state of optimizers.

A value that JSON has no word for is an object with one key that names its kind: ``{"tuple": […]}``. A tensor is put
elsewhere, and an object with the key ``"tensor"`` stands in its place. Values of other kinds are refused by name, and
``decode`` makes none but these, whatever the file says.
"""

import base64
import binascii
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from instep.errors import CheckpointError, DamagedCheckpointError

Json = Any
Put = Callable[[str, torch.Tensor], Mapping[str, Json]]
"""Takes a tensor, and its path in the value. Returns the object to write in its place, with the key ``"tensor"``."""
Get = Callable[[Mapping[str, Json]], torch.Tensor]
"""Takes the object that ``Put`` returned. Returns the tensor."""

DEEPEST = 32
"""How many values may be nested in one another: one that holds itself would never end."""
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def is_finite(values: torch.Tensor) -> bool:
    """Whether ``values`` hold neither NaN nor infinity."""
    if not (values.is_floating_point() or values.is_complex()):
        return True
    if values.element_size() == 1:
        values = values.float()  # torch asks no float of eight bits
    return bool(torch.isfinite(values).all())


def encode(value: Any, where: str, put: Put, path: str = "", depth: int = 0) -> Json:
    """``value`` as JSON.

    Args:
        where: the name of the outermost value, for messages.
        put: puts the tensors elsewhere.
        path: where ``value`` stands in the outermost value, in Python's notation.

    Raises:
        CheckpointError: ``value`` holds something that cannot be saved, named with its path.
    """
    if depth > DEEPEST:
        raise CheckpointError(
            f"{where}{path} is nested more than {DEEPEST} deep, or holds itself: give a flatter value"
        )
    # Of a subclass ``decode`` would make a plain value: an enum's member would come back as a number.
    if value is None or type(value) in (bool, str, int):
        return value
    # JSON has no NaN and no infinity. NumPy's float64 is a float, too.
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.Tensor):
        return dict(put(path, value))
    if type(value) is list:
        return [encode(item, where, put, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encode(item, where, put, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]}
    for kind, cls in _MAPPINGS.items():
        if type(value) is cls:
            pairs = [
                [
                    _encoded_key(key, where, put, f"{path}[{key!r}]"),
                    encode(item, where, put, f"{path}[{key!r}]", depth + 1),
                ]
                for key, item in value.items()
            ]
            return {kind: pairs}
    raise CheckpointError(
        f"{where}{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved. A checkpoint "
        "holds None, bool, int, float, str, bytes, list, tuple, dict and tensors: convert it (state_dict(), tolist(), "
        "torch.from_numpy)"
    )


def _encoded_key(key: Any, where: str, put: Put, path: str) -> Json:
    """A dict's key as JSON, which itself has strings alone: so a dict is a list of pairs."""
    plain = (type(None), bool, int, float, str, bytes)
    if not isinstance(key, plain) and not (type(key) is tuple and all(isinstance(part, plain) for part in key)):
        raise CheckpointError(f"the key of {where}{path} is a {type(key).__name__}: use a str, a number or a tuple")
    return encode(key, where, put, path)


def decode(value: Json, get: Get, depth: int = 0) -> Any:
    """The value that ``encode`` was given.

    Args:
        value: the JSON that ``encode`` returned.
        get: finds the tensors again.

    Raises:
        DamagedCheckpointError: ``encode`` never returns this.
    """
    if depth > DEEPEST:
        raise DamagedCheckpointError(f"a value is nested more than {DEEPEST} deep")
    if value is None or isinstance(value, (bool, str, int, float)):
        return value
    if isinstance(value, list):
        return [decode(item, get, depth + 1) for item in value]
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"a value is a {type(value).__name__}")
    if "tensor" in value:
        return get(value)
    if len(value) != 1:
        raise DamagedCheckpointError(f"a value has the keys {sorted(value)[:8]}")
    ((kind, content),) = value.items()
    return _of_kind(kind, content, get, depth)


def _of_kind(kind: str, content: Json, get: Get, depth: int) -> Any:
    """The value of a kind that JSON has no word for."""
    if kind == "float" and isinstance(content, str) and content in _NOT_FINITE:
        return _NOT_FINITE[content]
    if kind == "bytes" and isinstance(content, str):
        try:
            return base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            raise DamagedCheckpointError("bytes that are not base64") from None
    if kind == "tuple" and isinstance(content, list):
        return tuple(decode(item, get, depth + 1) for item in content)
    if kind in _MAPPINGS and isinstance(content, list):
        return _mapping(kind, content, get, depth)
    raise DamagedCheckpointError(f"a value of unknown kind {kind[:40]!r}")


def _mapping(kind: str, pairs: list[Json], get: Get, depth: int) -> dict[Any, Any]:
    found = _MAPPINGS[kind]()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DamagedCheckpointError("an item of a dict that is not a key with a value")
        key = decode(pair[0], _no_tensor, depth + 1)
        # Of the kinds that ``encode`` takes: a list as a key would be a TypeError.
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, (type(None), bool, int, float, str, bytes)) for part in parts):
            raise DamagedCheckpointError(f"a key of a dict that is a {type(key).__name__}")
        found[key] = decode(pair[1], get, depth + 1)
    return found


def _no_tensor(leaf: Mapping[str, Json]) -> torch.Tensor:
    raise DamagedCheckpointError("a tensor as the key of a dict")
