"""The state of torch that each thread has for itself: that of the loop's thread, for the threads of its forwards.

Three questions here have no public name: which modes of ``__torch_function__`` and ``__torch_dispatch__`` are entered,
and which hooks for saved tensors. ``tests/unit/test_engine.py`` fails clearly when torch changes them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from instep._optim.switches import in_threads
from instep.errors import InstepError


class ThreadState:
    """That of the thread that makes this: grad mode, autocast, default device, current stream, number of threads.

    Args:
        device: of the parameters.

    Raises:
        InstepError: something is entered that another thread cannot enter.
    """

    def __init__(self, device: torch.device) -> None:
        _require_nothing_else()
        self._grad = torch.is_grad_enabled()
        self._threads = torch.get_num_threads()
        self._default_device = torch.get_default_device()
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)
        }

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On another thread, which has just begun."""
        with ExitStack() as stack:
            stack.enter_context(in_threads(self._threads))
            if self._stream is not None:
                torch.accelerator.set_device_index(self._stream.device_index)
                torch.accelerator.set_stream(self._stream)
            if self._default_device != torch.get_default_device():
                stack.enter_context(self._default_device)
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            yield


def _require_nothing_else() -> None:
    functions = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    entered = [type(mode).__name__ for mode in (*functions, *_get_current_dispatch_mode_stack())]
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        entered.append("saved_tensors_hooks")
    if entered:
        raise InstepError(
            f"micro_batches() was called inside of {entered[0]}, which holds for this thread alone, and each forward "
            "runs on a thread of its own: enter it in loss_of(batch), or call micro_batches() outside of it"
        )
