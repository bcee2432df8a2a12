"""The state of torch that each thread has for itself: that of the loop's thread, for the threads of its forwards.

Entered modes and hooks for saved tensors have no public function that reads them, or enters them once more without
calling their ``__enter__``. ``tests/parity/test_micro_batches.py`` fails clearly when torch changes those used here.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from instep._optim.switches import in_threads

_saving = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""``None`` in torch 2.6, which tells nobody of the hooks: they do not see these forwards."""


class ThreadState:
    """That of the thread that makes this: grad mode, autocast, default device, current stream, number of threads; and
    what was entered there: modes of ``__torch_function__`` and ``__torch_dispatch__``, hooks for saved tensors.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._grad = torch.is_grad_enabled()
        self._threads = torch.get_num_threads()
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)
        }
        self._modes = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        self._saving = None if _saving is None else _saving(True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On another thread, once, and for the rest of its life."""
        if threading.get_ident() == self._thread:  # the interpreter is about to end: there are no threads any more
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(in_threads(self._threads))
            for kind, dtype in self._autocast.items():  # to leave it clears the copies that it has kept of weights
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            self._enter_the_rest()
            yield

    def _enter_the_rest(self) -> None:
        torch.set_grad_enabled(self._grad)
        if self._stream is not None:
            torch.accelerator.set_device_index(self._stream.device_index)
            torch.accelerator.set_stream(self._stream)
        if self._saving is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._saving)
        functions, operations = self._modes
        for mode in functions:
            torch._C._push_on_torch_function_stack(mode)
        for mode in operations:
            torch._C._push_on_torch_dispatch_stack(mode)
