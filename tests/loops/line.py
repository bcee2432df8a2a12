"""The line that is added to every loop, in this one place."""

from typing import Any

LINE: dict[str, Any] = {}
"""The options of ``instep.attach(model, optimizer, **LINE)``."""
