"""Modules that keep more than a checkpoint has."""

from torch import nn

from instep.errors import CheckpointError
from instep.naming import modules_of


def refuse_modules(model: nn.Module) -> None:
    """Raise ``CheckpointError`` for modules that keep more than parameters and buffers."""
    for prefix, module in modules_of(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"module {prefix.rstrip('.')!r} ({type(module).__name__}) keeps extra state of its own "
                "(get_extra_state), which may be anything. Save it with extra=, and give it back with "
                "set_extra_state() after load"
            )
