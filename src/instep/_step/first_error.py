"""The first error of a backward, kept while raising it would do harm: inside of a hook, or before DDP's own end."""


class FirstError:
    """
    Attributes:
        error: the error that is kept; ``None``: nothing has gone wrong.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def keep(self, error: BaseException) -> None:
        """Something has gone wrong. Errors after the first one follow from it, and are dropped."""
        self.error = self.error or error

    def forget(self) -> None:
        self.error = None

    def raise_if_any(self) -> None:
        """Raise the error with its own type, once."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would refer to itself, by way of this frame, and to all that the loop holds
