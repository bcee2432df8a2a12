"""What is copied or saved of an attached model is a plain model: its hook tables without those of the attachment.

torch pickles the hooks of a module with it. ``copyreg`` is Python's public place for how objects of a class are copied
and pickled; it is asked by ``copy``, ``pickle``, ``torch.save`` and those who build on them. A module whose class says
itself how it is copied (``__deepcopy__``) takes the hooks along, and these do nothing in a copy.
"""

import copyreg
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from instep._autograd.calls import CALL, GuardedCall
from instep._autograd.hooks import BoundHook

# Where torch keeps a module's hooks, and where it notes by the same number what is special about one.
_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)
# The one that torch.save uses, of those that know __reduce_ex__: copyreg does not say which is asked for.
_PROTOCOL = 2
_users: Counter[type] = Counter()
_others: dict[type, Callable[[Any], Any]] = {}  # that were registered before


class PlainPickles:
    """Leaves the hooks of attachments out of the copies and pickles of ``modules``, until it is removed or dropped."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        classes = {type(module) for module in modules}
        for cls in classes:
            _users[cls] += 1
            found = copyreg.dispatch_table.get(cls)
            if found is not _reduced:
                if found is not None:
                    _others[cls] = found
                copyreg.pickle(cls, _reduced)
        self._finalizer = weakref.finalize(self, _release, classes)
        self._finalizer.atexit = False

    def remove(self) -> None:
        self._finalizer()


def _release(classes: Iterable[type]) -> None:
    for cls in classes:
        _users[cls] -= 1
        if _users[cls] > 0:
            continue
        del _users[cls]
        other = _others.pop(cls, None)
        if copyreg.dispatch_table.get(cls) is not _reduced:
            continue  # somebody has registered another one since
        if other is None:
            del copyreg.dispatch_table[cls]
        else:
            copyreg.pickle(cls, other)


def _reduced(module: nn.Module) -> Any:
    other = _others.get(type(module))
    reduced = module.__reduce_ex__(_PROTOCOL) if other is None else other(module)
    return tuple(map(_without_hooks, reduced)) if isinstance(reduced, tuple) else reduced


def _without_hooks(part: Any) -> Any:
    """``part`` of what a module is made from again: its state, or a tuple of arguments with the state in it."""
    if type(part) is tuple:
        return tuple(map(_without_hooks, part))
    if type(part) is not dict:
        return part
    if isinstance(part.get(CALL), GuardedCall):
        part = {key: value for key, value in part.items() if key != CALL}
    tables = {name: part[name] for name in _TABLES if isinstance(part.get(name), Mapping)}
    ours = {number for table in tables.values() for number, hook in table.items() if _is_ours(hook)}
    left = {
        name: type(table)((number, hook) for number, hook in table.items() if number not in ours)
        for name, table in tables.items()
        if not ours.isdisjoint(table)
    }
    return {name: left.get(name, value) for name, value in part.items() if not isinstance(value, BoundHook)}


def _is_ours(hook: Any) -> bool:
    """torch wraps the hooks of ``load_state_dict()`` in an object with the hook in it."""
    return isinstance(getattr(hook, "hook", hook), BoundHook)
