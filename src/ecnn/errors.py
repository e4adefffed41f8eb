"""What can go wrong through no fault of ours: one sentence each, shown as it is by the command line."""


class InputError(ValueError):
    """Something the caller gave cannot be used; the message says what was expected, what came, what to do."""


class DiskError(OSError):
    """The disk or the system failed: full, unreadable, a folder moved away; the message says what is kept."""
