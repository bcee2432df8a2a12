"""``offload="host"``: the state of the optimizers goes to host memory, and stays there when it is loaded."""

import weakref
from collections.abc import Iterator, Sequence
from functools import partial

from torch.optim import Optimizer

from instep._autograd.hooks import UntracedHook
from instep._optim.host_loading import HostLoading
from instep._optim.host_state import HostState, Part, StateHome
from instep._optim.stepper import Stepper
from instep._step.schedule import Schedule
from instep._wiring.held import Handles


def offload(
    schedule: Schedule,
    optimizers: Sequence[Optimizer],
    steppers: Sequence[Stepper],
    bucket_bytes: int,
    handles: Handles,
) -> None:
    """
    Raises:
        UnsupportedOptimizerError: an optimizer has state that cannot live in host memory.
    """
    state = HostState()
    for optimizer, stepper in zip(optimizers, steppers, strict=True):
        parts = partial(_parts_of, weakref.ref(schedule), weakref.ref(stepper))
        stepper.home = home = StateHome(state, optimizer, parts, bucket_bytes)
        home.take_in()
        loading = HostLoading(home)
        handles.append(optimizer.register_load_state_dict_pre_hook(UntracedHook(loading.before)))
        handles.append(optimizer.register_load_state_dict_post_hook(UntracedHook(loading.after)))


def _parts_of(schedule: "weakref.ref[Schedule]", stepper: "weakref.ref[Stepper]") -> Iterator[Part]:
    """The parameters that ``stepper`` steps: some may have been added since ``attach``."""
    found = schedule()
    for attached in () if found is None else found.parameters:
        if attached.stepper is stepper() and (parameter := attached.peek()) is not None:
            yield parameter, attached.shard
