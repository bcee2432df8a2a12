"""A backward that does more than compute gradients: for several micro-batches at once it does so in another order."""

from instep._optim.generators import Generators
from instep._wiring.build import Parts
from instep.errors import AccumulationError


class BackwardDoes:
    """Random numbers that are drawn, and buffers that are written, from now on. The plain loop does both after each
    micro-batch's forward, before the next one's.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._generators = Generators({a.spec.device for a in parts.schedule.parameters})
        model = parts.held.model()
        self._buffers = [] if model is None else [(name, b, b._version) for name, b in model.named_buffers()]

    def require_nothing(self) -> None:
        """Raise, and leave the step torn if it has written weights."""
        written = next((name for name, buffer, version in self._buffers if buffer._version != version), None)
        if written is not None:
            found = f"backward has written the buffer {written!r} (batch normalization in a checkpointed segment?)"
        elif self._generators.drawn() == "yes":
            found = "backward has drawn random numbers"
        else:
            return
        error = AccumulationError(
            f"{found}: with one backward for all micro-batches it does so after all forwards, and the plain loop after "
            "each. This step is not the plain loop's. Use overlap.accumulate() in place of micro_batches()"
        )
        self._parts.schedule.stop(error)
