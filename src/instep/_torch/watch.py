"""Makes it known when somebody uses a parameter, or asks an optimizer for its ``state``, whoever holds a reference."""

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from instep._torch.lifetime import WeakMethod

# Makes it known when somebody uses a parameter in Python, whoever holds a reference to it.
#
# A watched parameter's ``__class__`` is a subclass of its own class with a ``__torch_function__``, as torch's lazy
# parameters change theirs when they get a shape (``torch/nn/parameter.py``, ``UninitializedTensorMixin``). Every torch
# function, method and attribute that is given the parameter passes through it first. The object itself, its identity,
# hash and autograd node stay as they are. What reads memory without asking torch is not seen: an alias made before
# (``detach()``, a NumPy array), a graph that has saved the tensor (its version counter tells).


Used = Callable[[torch.Tensor, Any], None]
"""Called with a watched parameter and the torch function that is about to use it, before it does."""

_grad: Any = torch.Tensor.grad
GET_GRAD = _grad.__get__
"""What a reader of ``.grad`` calls."""
SET_GRAD = _grad.__set__
"""What a writer of ``.grad`` calls. Under ``DisableTorchFunctionSubclass`` nobody is told of either."""
_DELETE_GRAD = _grad.__delete__
_ABOUT_GRAD = frozenset({GET_GRAD, SET_GRAD, _DELETE_GRAD})

_PROPERTIES = (
    "_backward_hooks",
    "_cdata",
    "_grad_fn",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad_dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "name",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)
_METHODS = (
    "__hash__",
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_same_size",
    "is_signed",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
)
_FUNCTIONS = (
    torch.is_complex,
    torch.is_floating_point,
    torch.is_inference,
    torch.is_same_size,
    torch.numel,
)
_WITHOUT_VALUES = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.Tensor.requires_grad.__set__, *_FUNCTIONS]  # type: ignore[attr-defined]
)


class Watch:
    """Watches parameters until told to stop.

    Args:
        values: a method, called before the values of a watched parameter are read or written; ``None``: that is of
            no interest.
        gradient: the same for its ``.grad`` being read or replaced.
    """

    def __init__(self, values: Used | None = None, gradient: Used | None = None) -> None:
        # Weakly: the owner of these methods owns the watch.
        self._values = None if values is None else WeakMethod(values)
        self._gradient = None if gradient is None else WeakMethod(gradient)
        self._classes: dict[type, type] = {}
        self._made: dict[type, type] = {}  # the other way round

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            cls = type(parameter)
            made = self._classes.get(cls)
            if made is not None:
                parameter.__class__ = made
            elif not issubclass(cls, _Watched):
                parameter.__class__ = self._watched(cls)

    def stop(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            plain = self._made.get(type(parameter))
            if plain is not None:
                parameter.__class__ = plain

    def take_from(self, other: "Watch", parameters: Iterable[torch.Tensor]) -> None:
        """Watch those of ``parameters`` that ``other`` watches, in its place."""
        for parameter in parameters:
            plain = other._made.get(type(parameter))
            if plain is not None:
                parameter.__class__ = self._classes.get(plain) or self._watched(plain)

    def used(self, parameter: torch.Tensor, func: Any, about_grad: bool) -> None:
        ref = self._gradient if about_grad else self._values
        call = None if ref is None else ref()
        if call is not None:
            call(parameter, func)

    def _watched(self, cls: type) -> type:
        names = {
            "_plain": cls,
            "_watch": weakref.ref(self),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        if _LOCAL in vars(cls):  # a DTensor: torch reads and replaces its local tensor without a torch function
            names[_LOCAL] = _watched_attribute(vars(cls)[_LOCAL])
        elif cls in (torch.Tensor, torch.nn.Parameter):
            names["grad"] = _WATCHED_GRAD
        made = self._classes[cls] = type(cls.__name__, (_Watched, cls), names)
        self._made[made] = cls
        return made


class ModuleHooks:
    """Hooks before the forward of modules, that are there between ``start`` and ``stop``: a module without a hook is
    called by a shorter way, and a model may have hundreds.

    Attributes:
        are_there: whether some may be there.
    """

    def __init__(self) -> None:
        self.are_there = False
        self._hooks: list[tuple[RemovableHandle, Callable[..., Any]]] = []

    def add(self, handle: RemovableHandle, hook: Callable[..., Any]) -> None:
        """``hook``, which has just been registered. Whoever detaches removes it by its ``handle``, as ever."""
        self._hooks.append((handle, hook))
        self.are_there = True

    # A handle knows the dictionary that its hook is in. Hooks that are removed and registered would take as long as
    # they save.

    def start(self) -> None:
        self.are_there = True  # first, for Ctrl-C: hooks too many do nothing
        for handle, hook in self._hooks:
            if (hooks := handle.hooks_dict_ref()) is not None:
                hooks[handle.id] = hook

    def stop(self) -> None:
        for handle, _ in self._hooks:
            if (hooks := handle.hooks_dict_ref()) is not None:
                hooks.pop(handle.id, None)
        self.are_there = False


_LOCAL = "_local_tensor"


def _watched_attribute(slot: Any) -> property:
    def tell(parameter: torch.Tensor) -> None:
        watch = parameter._watch() if isinstance(parameter, _Watched) else None
        if watch is not None:
            watch.used(parameter, slot, False)

    def read(parameter: torch.Tensor) -> Any:
        tell(parameter)
        return slot.__get__(parameter)

    def write(parameter: torch.Tensor, value: Any) -> None:
        tell(parameter)
        slot.__set__(parameter, value)

    return property(read, write)


def _get_grad(parameter: "_Watched") -> torch.Tensor | None:
    _tell_of_grad(parameter, GET_GRAD)
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = GET_GRAD(parameter)
        return gradient


def _set_grad(parameter: "_Watched", gradient: torch.Tensor | None) -> None:
    _tell_of_grad(parameter, SET_GRAD)
    with torch._C.DisableTorchFunctionSubclass():
        SET_GRAD(parameter, gradient)


def _delete_grad(parameter: "_Watched") -> None:
    _tell_of_grad(parameter, _DELETE_GRAD)
    with torch._C.DisableTorchFunctionSubclass():
        _DELETE_GRAD(parameter)


def _tell_of_grad(parameter: torch.Tensor, func: Any) -> None:
    if not torch._C._is_torch_function_enabled():
        return  # instep's own question
    ref = getattr(parameter, "_watch", None)  # as ``_watch_of``, which is asked for less often
    if ref is not None and (watch := ref()) is not None:
        watch.used(parameter, func, True)


def _watch_of(parameter: torch.Tensor) -> Watch | None:
    """Who watches it; ``None``: nobody, or nobody any more. In one look: a signal's handler may use it in between, or
    another thread, and take it off."""
    watch: Callable[[], Watch | None] | None = getattr(parameter, "_watch", None)
    return None if watch is None else watch()


# Every loop reads and clears .grad of every parameter: a property takes a fifth of the time of a torch function.
_WATCHED_GRAD = property(_get_grad, _set_grad, _delete_grad)


class _Watched(torch.Tensor):
    """A parameter whose uses are told, until nobody watches it any more."""

    _plain: type
    _watch: Callable[[], Watch | None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        about_grad = func in _ABOUT_GRAD
        # Most loops read and clear .grad between steps, of every parameter. Where it is read, or replaced by a plain
        # tensor or nothing, no other class has a say.
        if func in _WITHOUT_VALUES or (
            about_grad and type(args[0]) is cls and (len(args) == 1 or args[1] is None or type(args[1]) is torch.Tensor)
        ):
            if about_grad and (owner := cls._watch()) is not None:
                owner.used(args[0], func, about_grad)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        watched = list(_watched_in((args, kwargs)))
        for parameter in watched:
            # The same one may stand there twice.
            watch = _watch_of(parameter)
            if watch is not None:
                watch.used(parameter, func, about_grad)
        # As it would run without anybody watching: other classes among the arguments have a say.
        still = [(p, type(p)) for p in watched if _watch_of(p) is not None]
        for parameter in watched:
            _unwatch(parameter)
        try:
            result = func(*args, **kwargs)
        finally:
            for parameter, as_watched in still:
                parameter.__class__ = as_watched
        return _of_its_class(args[0], result) if func is torch.Tensor.detach else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.detach()  # the values are about to be read
        watched = type(self)
        _unwatch(self)  # or the copy would be watched too
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = watched


def plain_type(of: Any) -> type[Any]:
    """The class of a parameter or an optimizer, as it is when nobody watches."""
    kind: type[Any] = type(of)
    return kind._plain if issubclass(kind, (_Watched, _Waiting)) else kind


def _of_its_class(parameter: torch.Tensor, detached: torch.Tensor) -> torch.Tensor:
    """What ``detach()`` returns. ``nn.Parameter(parameter)``, which sees that it is none of torch's own two classes,
    asks for a tensor of the same class as the parameter has then."""
    frame, depth = sys._getframe(2), 0  # of who has called ``detach()``, or of a mode of torch's in between
    while frame.f_code is not _NEW_PARAMETER:
        if frame.f_back is None or depth == _MODES:
            return detached
        frame, depth = frame.f_back, depth + 1
    if (watch := _watch_of(parameter)) is not None and watch._values is None:
        _unwatch(parameter)  # nobody wants to know of this use, nor much of what comes after it
    made: torch.Tensor = detached
    if type(parameter) is torch.nn.Parameter:
        made = torch.Tensor._make_subclass(torch.nn.Parameter, detached)
    return made


_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__
_MODES = 3  # that may be on at once: more than a loop has


def _unwatch(of: Any) -> None:
    of.__class__ = plain_type(of)


def _watched_in(values: Any) -> Iterator[Any]:
    if isinstance(values, _Watched):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _watched_in(value)
    elif isinstance(values, dict):
        yield from _watched_in(list(values.values()))


# Makes it known when somebody asks an optimizer for its ``state``, as ``watch`` does for parameters: meanwhile the
# optimizer's class is a subclass of its own with a property.


class StateWatch:
    """Watches optimizers until told to stop.

    Args:
        used: a method, called before ``state`` is read, replaced or copied.
    """

    def __init__(self, used: Callable[[Optimizer], None]) -> None:
        self._used = WeakMethod(used)  # its owner owns the watch
        self._classes: dict[type, type] = {}

    def start(self, optimizer: Optimizer) -> None:
        cls = type(optimizer)
        if not issubclass(cls, _Waiting):
            if cls not in self._classes:
                names = {"_plain": cls, "_used": self._used, "__module__": cls.__module__}
                self._classes[cls] = type(cls.__name__, (_Waiting, cls), {**names, "__qualname__": cls.__qualname__})
            optimizer.__class__ = self._classes[cls]

    def stop(self, optimizer: Optimizer) -> None:
        _unwatch(optimizer)


class _Waiting:
    """An optimizer whose ``state`` is waited for, until nobody watches it any more."""

    _plain: Any
    _used: Any

    def __init_subclass__(cls) -> None:
        """The class that is watched need not know of this one."""

    @staticmethod
    def _owner_of(optimizer: Any) -> Any:
        """Who waits; ``None``: nobody any more. A signal's handler, or another thread, may have used it meanwhile."""
        used = getattr(optimizer, "_used", None)
        return None if used is None else used()

    @contextmanager
    def _told(self) -> Iterator[Any]:
        """Itself, as its own class. The watch goes on after that if its owner has not stopped it."""
        used = _Waiting._owner_of(self)
        if used is not None:
            used(self)
        watched = type(self)
        _unwatch(self)
        try:
            yield self
        finally:
            if used is not None and issubclass(watched, _Waiting):
                self.__class__ = watched

    @property
    def state(self) -> Any:
        if "state" in vars(self) and not hasattr(plain_type(self), "state"):
            # As torch's own have it. Without a change of class: the thread that updates asks, too.
            if (used := _Waiting._owner_of(self)) is not None:
                used(self)
            return vars(self)["state"]
        with self._told() as plain:
            return plain.state

    @state.setter
    def state(self, value: Any) -> None:
        with self._told() as plain:
            plain.state = value

    @state.deleter
    def state(self) -> None:
        with self._told() as plain:
            del plain.state

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._told() as plain:
            return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._told() as plain:
            return copy.deepcopy(plain, memo)

    def __copy__(self) -> Any:
        with self._told() as plain:
            return copy.copy(plain)
