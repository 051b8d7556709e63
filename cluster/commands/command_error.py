"""Why a command failed, in words for the person who typed it."""


class CommandError(Exception):
    """Ends a command with exit code 1; the message says what to do."""
