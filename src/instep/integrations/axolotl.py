"""instep in axolotl: one line of YAML, which gives axolotl's trainer the callback of ``integrations.transformers``.

.. code-block:: yaml

    plugins:
      - instep.integrations.axolotl.InstepPlugin
"""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as error:
    raise ImportError(
        "instep.integrations.axolotl is for axolotl, which is not installed: pip install axolotl"
    ) from error

from instep._gradients.clipping import ClipNorm
from instep.errors import AttachError
from instep.integrations.transformers import InstepCallback

__all__ = ["InstepArgs", "InstepPlugin"]


class InstepArgs(BaseModel):
    """What axolotl's configuration may have besides its own.

    Attributes:
        instep: options of ``InstepCallback`` by name. ``clip`` has those of ``ClipNorm``: ``{max_norm: 1.0, mode:
            two_pass}``.
    """

    instep: dict[str, Any] | None = None


class InstepPlugin(BasePlugin):  # type: ignore[misc]  # mypy does not follow this import
    """Attaches what axolotl trains, as ``InstepCallback`` does in any ``Trainer``.

    Raises:
        AttachError: an option that ``InstepCallback`` does not have, or that does not fit; nothing was loaded yet.
    """

    def get_input_args(self) -> str:
        """Returns the name of ``InstepArgs``, which axolotl adds to its own configuration."""
        return f"{InstepArgs.__module__}.{InstepArgs.__qualname__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Refuse options before anything is loaded."""
        _callback(cfg)

    def add_callbacks_pre_trainer(self, cfg: Mapping[str, Any], model: object) -> list[TrainerCallback]:
        """Returns the callback for the trainer that is about to be made."""
        return [_callback(cfg)]


def _callback(cfg: Mapping[str, Any]) -> InstepCallback:
    given = dict(cfg.get("instep") or {})
    options = dict(given)
    try:
        if options.get("clip") is not None:
            options["clip"] = ClipNorm(**options["clip"])
        return InstepCallback(**options)
    except TypeError as error:
        raise AttachError(
            "instep: in axolotl's configuration takes the options of InstepCallback, and in clip: those of ClipNorm. "
            f"Found {given!r}: {error}"
        ) from error
