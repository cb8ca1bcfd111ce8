"""The one exception that means "the user can fix this": entry points print it without a stack trace."""


class EyasError(ValueError):
    """A mistake in configuration, data or files. The message names the key, file or row and what to do."""
