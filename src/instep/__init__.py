"""instep runs the optimizer step inside backward, with numbers bit for bit those of the plain loop."""

import importlib
from typing import TYPE_CHECKING, Any

from instep._version import __version__ as __version__

if TYPE_CHECKING:
    from instep.attachment import Attachment as Attachment
    from instep.attachment import attach as attach
    from instep.attachment import attached as attached
    from instep.verification import Verification as Verification
    from instep.verification import verify as verify

_ROOMS = {
    "Attachment": "attachment",
    "attach": "attachment",
    "attached": "attachment",
    "Verification": "verification",
    "verify": "verification",
    "errors": "errors",
    "comm_hooks": "comm_hooks",
}
__all__ = ["Attachment", "Verification", "attach", "attached", "verify"]


def __getattr__(name: str) -> Any:
    # On first use: `instep --help` should not wait for torch.
    if name not in _ROOMS:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    room = importlib.import_module(f"instep.{_ROOMS[name]}")
    return room if name == _ROOMS[name] else getattr(room, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
