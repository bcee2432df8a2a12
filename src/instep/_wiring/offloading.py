"""``offload="host"``: the state of the optimizers goes to host memory, and stays there when it is loaded."""

from collections.abc import Sequence

from torch.optim import Optimizer

from instep._autograd.hooks import UntracedHook
from instep._optim.host_loading import HostLoading
from instep._optim.host_state import HostState, StateHome
from instep._optim.parameters import AttachedParameter
from instep._optim.stepper import Stepper
from instep._wiring.held import Handles


def offload(
    parameters: Sequence[AttachedParameter],
    optimizers: Sequence[Optimizer],
    steppers: Sequence[Stepper],
    handles: Handles,
) -> None:
    """
    Raises:
        UnsupportedOptimizerError: an optimizer has state that cannot live in host memory.
    """
    state = HostState()
    shards = {id(a.get()): a.shard for a in parameters if a.shard is not None}
    for optimizer, stepper in zip(optimizers, steppers, strict=True):
        stepper.home = home = StateHome(state, optimizer, shards.get)
        home.take_in()
        loading = HostLoading(home)
        handles.append(optimizer.register_load_state_dict_pre_hook(UntracedHook(loading.before)))
        handles.append(optimizer.register_load_state_dict_post_hook(UntracedHook(loading.after)))
