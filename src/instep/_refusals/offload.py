"""``offload``."""

from instep._optim.local_shard import memory_of
from instep.errors import AttachError
from instep.options import Options
from instep.target import Target


def unknown(target: Target, options: Options) -> None:
    if options.offload is not None and options.offload != "host":
        raise AttachError(f"offload must be None or 'host', not {options.offload!r}")


def checked(target: Target, options: Options) -> None:
    if options.offload is not None and options.check_steps:
        raise AttachError(
            f"check_steps={options.check_steps} does not go with offload={options.offload!r}: it steps copies of "
            "parameters and state on the device. Check without offload, and then leave out check_steps"
        )


def divided(target: Target, options: Options) -> None:
    if options.offload is not None and options.communication.shard_state:
        raise AttachError(
            f"offload={options.offload!r} does not go with shard_state=True, which sends optimizer state between the "
            "ranks' devices in state_dict() and detach(). Leave out one of the two"
        )


def on_the_cpu(target: Target, options: Options) -> None:
    if options.offload is None:
        return
    for parameter in target.optimized():
        if (device := memory_of(parameter).device).type in ("cpu", "meta"):
            named = target.names.get(id(parameter))
            name = f"{named[1][0].name!r}" if named else f"of shape {tuple(parameter.shape)}"
            raise AttachError(
                f"offload={options.offload!r} keeps optimizer state in host memory, away from an accelerator, and the "
                f"parameter {name} is on {device}: leave out offload"
            )
