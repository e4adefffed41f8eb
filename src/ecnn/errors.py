"""Errors that are no bugs of ours. The command line shows their message, one sentence, and no traceback."""


class InputError(ValueError):
    """Something that the caller gave cannot be used. The message says what was expected, what came, what to do."""


class DiskError(OSError):
    """The disk or the system failed: it is full or unreadable, or a folder has moved. The message says what is kept."""
