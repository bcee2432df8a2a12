"""``instep selftest``: whether the numbers are the plain loop's on this machine, and what instep gives here."""


class SelftestError(Exception):
    """The selftest cannot run. The message is for the user: what was found and what to do, in a line."""
