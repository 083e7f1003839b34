"""Why a module cannot be inlined."""

BY_VALUE = "values of a tensor"  # in every reason that is about what a tensor holds


class CannotInlineError(Exception):
    """Raised while a module's `forward` is traced: the module has to stay whole."""


class WritesAttributeError(CannotInlineError):
    """A forward writes an attribute of its module."""
