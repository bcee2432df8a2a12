"""Why nothing can be planned."""


class PlanError(Exception):
    """What was named cannot be planned with. The message is for the user: what was found and what to do."""
