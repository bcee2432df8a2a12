"""A backward that does more than compute gradients: for several micro-batches at once it does so in another order."""

import torch

from instep._optim.generators import Generators
from instep._wiring.build import Parts
from instep.errors import AccumulationError


class BackwardDoes:
    """Random numbers that are drawn, and buffers that are written, from now on. The plain loop does both after each
    micro-batch's forward, before the next one's.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        devices = {a.spec.device for a in parts.schedule.parameters} - {torch.device("cpu")}
        # The engine's own thread draws on an accelerator. On the CPU another thread of the loop's may have drawn.
        self._on_devices = [(device, _state_of(device)) for device in devices]
        self._generators = Generators(())
        model = parts.held.model()
        self._buffers = {} if model is None else {name: (b, b._version) for name, b in model.named_buffers()}

    def require_nothing(self) -> None:
        """Raise, and leave the step torn if it has written weights."""
        model = self._parts.held.model()
        now = {} if model is None else dict(model.named_buffers())
        written = next(
            (name for name, before in self._buffers.items() if not _is_as_before(now.get(name), *before)), None
        )
        if written is not None:
            found = f"backward has written the buffer {written!r} (batch normalization in a checkpointed segment?)"
        elif self._has_drawn():
            found = "backward has drawn random numbers"
        else:
            return
        self._parts.schedule.stop(
            AccumulationError(
                f"{found}: with one backward for all micro-batches it does so after all forwards, and the plain loop "
                "after each. This step is not the plain loop's. Use overlap.accumulate() in place of micro_batches()"
            )
        )

    def _has_drawn(self) -> bool:
        drew = any(_state_of(device) != before for device, before in self._on_devices)
        return drew or self._generators.drawn() == "yes"


def _is_as_before(buffer: torch.Tensor | None, before: torch.Tensor, version: int) -> bool:
    return buffer is before and before._version == version


def _state_of(device: torch.device) -> list[int]:
    state: list[int] = torch.get_device_module(device).get_rng_state(device).tolist()
    return state
