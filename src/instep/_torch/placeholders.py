"""What stands in ``.grad`` for a gradient that is not there, or not there yet."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from instep.errors import InstepError, SpentGradientError

CONVERSION = "_to_copy"
"""What ``model.to()`` does to each gradient. It needs no values, only the new dtype and device."""
DETACH = "detach"
"""What ``.data`` is: old loops clear by ``p.grad.data.zero_()``. It needs no values as long as nobody asks for them."""
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""What ``GradScaler.unscale_`` and ``step`` do to all gradients of an optimizer at once."""

ACCUMULATE = ("add_", "add")
"""What autograd does to the gradient that is there when another arrives: in place, or not with ``create_graph``."""
ZERO = ("zero_", "_foreach_zero_")
"""What ``zero_grad(set_to_none=False)`` does to each gradient, or to all of a device and dtype at once."""
NEW_LIKE = frozenset(
    [f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")]
    + [f"new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided")]
)
"""What makes a tensor of the gradient's shape, dtype and device, with values of its own."""


def dtype_of_gradient(parameter: torch.Tensor) -> torch.dtype:
    """The parameter's own, unless the loop has said another one (``grad_dtype``, since torch 2.10)."""
    said: torch.dtype | None = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return said or parameter.dtype


Explain = Callable[[str], InstepError | None]
BeforeUse = Callable[[str, Sequence[Any]], None]


class Placeholder(torch.Tensor):
    """A tensor of the gradient's shape, dtype and device without storage. What any use of its values means, the
    subclass says.

    Args:
        like: a gradient, the parameter of one, or another placeholder.
        dtype, device: ``None``: those of ``like``.
    """

    _class: "_OwnClass | None"

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Any:
        placeholder: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        placeholder._class = _OwnClass.of(like)
        return placeholder

    def _use(self, operation: str, args: Sequence[Any], dtype: Any, device: Any) -> torch.Tensor:
        """The tensor to use in its place; or an error is raised."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """What torch's own tensors have not: a gradient may be of another class, such as a DTensor."""
        own = vars(self).get("_class")
        if own is None or not (name in own.attributes or hasattr(own.kind, name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            real = self._use(f"{own.kind.__name__}.{name}", (), None, None)
        except InstepError as error:
            # The same error, and an ``AttributeError``: who asks whether there is an attribute (``hasattr``) finds
            # none, as of any other tensor.
            cls = type(error)
            both: type[InstepError] = type(cls.__name__, (cls, AttributeError), {"__module__": cls.__module__})
            raise both(*error.args) from None
        return getattr(real, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """These reach for the storage, or put another one in its place, without passing through the dispatcher."""
        moved = func == _SET_DATA and isinstance(args[1], Placeholder)  # model.to() does so
        if func in _ON_STORAGE and not moved:
            return func(*_used(getattr(func, "__name__", str(func)), args, {})[0], **(kwargs or {}))
        # torch's own would make placeholders of real results.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub types the disabled default
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = func.overloadpacket.__name__
        args, kwargs = _used(operation, args, kwargs or {})
        if args and isinstance(args[0], Placeholder):
            if operation not in NEW_LIKE:
                return args[0]  # which has done what there was to do
            like = args[0]
            kwargs.setdefault("device", like.device)
            # Of the same form and of torch's own class, and without memory, and so without values.
            args = (torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"), *args[1:])
        if operation == "_foreach_zero_":
            args = ([gradient for gradient in args[0] if not isinstance(gradient, Placeholder)],)
            if not args[0]:
                return None  # torch takes no empty list
        return func(*args, **kwargs)


class _OwnClass(NamedTuple):
    """What a tensor of a class that is none of torch's own two has beyond these."""

    kind: type
    attributes: frozenset[str]

    @staticmethod
    def of(tensor: torch.Tensor) -> "_OwnClass | None":
        """``None``: it is of one of torch's own two classes."""
        if isinstance(tensor, Placeholder):
            return vars(tensor).get("_class")
        kind = type(tensor)
        return None if kind in (torch.Tensor, torch.nn.Parameter) else _OwnClass(kind, frozenset(vars(tensor)))


class SpentGradient(Placeholder):
    """A gradient that was applied during backward, and freed: any use of its values raises.

    It stays until ``zero_grad()``. ``None`` in its place would be silently wrong: ``clip_grad_norm_`` would return 0,
    a second backward would accumulate into nothing, and so would the next step's in a loop that never clears its
    gradients.

    Args:
        name: of the parameter, for its ``repr``.
        explain: makes the error to raise from the name of the operation that was tried; ``None`` lets an operation
            pass that needs no values, and is all that is said once the attachment is gone.
    """

    def __init__(self, like: torch.Tensor, name: str, explain: Explain, **form: Any) -> None:
        self._of = name
        self._explain = explain

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"SpentGradient(of {self._of!r}: applied during backward, and freed)"

    def _use(self, operation: str, args: Sequence[Any], dtype: Any, device: Any) -> torch.Tensor:
        error = self._explain(operation)
        if error is None and not self._can_do_without_values(operation, args):
            error = SpentGradientError(
                f"{operation} met the gradient of {self._of!r}: applied during backward, and freed"
            )
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame
        makes_another = operation in (CONVERSION, DETACH)
        return type(self)(self, self._of, self._explain, dtype=dtype, device=device) if makes_another else self

    def _can_do_without_values(self, operation: str, args: Sequence[Any]) -> bool:
        if not args or (args[0] is not self and not isinstance(args[0], (list, tuple))):
            return False
        # A new tensor would be of another class than the gradient is.
        return operation in _WITHOUT_VALUES or (operation in NEW_LIKE and self._class is None)


class WaitingGradient(SpentGradient):
    """The sum of gradients of micro-batches whose backward has not run yet: any use of its values raises. ``explain``
    lets pass that it is zeroed."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"WaitingGradient(of {self._of!r}, of micro-batches whose backward has not run yet)"


class HeldGradient(Placeholder):
    """A gradient that instep still needs: whoever uses its values gets the real one, and instep is told before.

    Args:
        real: the gradient it stands for, a dense one.
        before_use: a weak reference to a method, which is called with the name of the operation that is about to use
            it, and its arguments. Weak: its owner outlives no model, and must not through ``.grad``.
    """

    def __init__(self, real: torch.Tensor, before_use: Callable[[], BeforeUse | None]) -> None:
        self._real = real
        self._before_use = before_use

    def use(self) -> torch.Tensor:
        """The gradient itself, to be used now."""
        return self._use("use", ())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return repr(self.use())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._use("__reduce_ex__", ()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._use("__deepcopy__", ()).__deepcopy__(memo)

    def _use(self, operation: str, args: Sequence[Any], dtype: Any = None, device: Any = None) -> torch.Tensor:
        before_use = self._before_use()
        if before_use is not None:
            before_use(operation, args)
        return self._real


class ZeroedGradient(HeldGradient):
    """Zeros, which take no memory until somebody uses them: what ``zero_grad(set_to_none=False)`` makes of a gradient
    that was applied in backward, and freed.

    Autograd adds the next gradient to real zeros. ``optimizer.step()`` finds real zeros where no gradient came, and
    moves such a parameter by its momentum and weight decay, as in the plain loop.

    Args:
        parameter: whose gradient it is, a plain tensor.
    """

    def __init__(self, parameter: torch.Tensor, **form: Any) -> None:
        self._real = _NOTHING

    @staticmethod
    def is_unused(gradient: torch.Tensor | None) -> bool:
        """Whether ``gradient`` is one of these, and nobody has looked at its zeros, or written to them."""
        return isinstance(gradient, ZeroedGradient) and gradient._real is _NOTHING

    def _use(self, operation: str, args: Sequence[Any], dtype: Any = None, device: Any = None) -> torch.Tensor:
        if self._real is _NOTHING:
            if operation in ZERO:
                return self
            # Whatever modes the loop is in: torch has zeroed a tensor that was there.
            with torch.inference_mode(False), torch.no_grad():
                self._real = torch.empty_strided(
                    self.shape, self.stride(), dtype=self.dtype, device=self.device
                ).zero_()
        return self._real


_NOTHING = torch.empty(0)


_WITHOUT_VALUES = (CONVERSION, DETACH, *ACCUMULATE, *ZERO)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ON_STORAGE = (
    _SET_DATA,
    torch.Tensor.share_memory_,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.__array__,
    torch.Tensor._typed_storage,
    torch.Tensor.apply_,
    torch.Tensor.is_shared,
    torch.Tensor.map_,
    torch.Tensor.map2_,
    torch.Tensor.numpy,
    torch.Tensor.storage,
    torch.Tensor.tolist,
)


def _used(operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, each placeholder replaced by what it says is to be used in its place."""
    use = partial(_used_in, operation, args, kwargs.get("dtype"), kwargs.get("device"))
    return tuple(use(arg) for arg in args), {key: use(value) for key, value in kwargs.items()}


def _used_in(operation: str, args: Sequence[Any], dtype: Any, device: Any, value: Any) -> Any:
    if isinstance(value, Placeholder):
        return value._use(operation, args, dtype, device)
    if isinstance(value, (list, tuple)):
        return type(value)(_used_in(operation, args, dtype, device, item) for item in value)
    return value
