"""The error of wrong arguments."""


class UsageError(Exception):
    """The arguments are wrong; the message says what to do."""
