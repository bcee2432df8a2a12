"""Why a demo stops early."""


class DemoError(Exception):
    """The demo cannot run. The message is for the user: what was found and what to do, in a line or two.

    It has a traceback only when a rank raised something unforeseen.
    """
