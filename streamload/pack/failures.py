"""The error of wrong arguments."""


class UsageError(ValueError):
    """The arguments are wrong; the message says what to do."""
