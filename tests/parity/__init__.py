"""What the tests of other systems promise to their users, held by fxsplit under the same names.

A file for each system, a test for each of its tests that speaks of what a user sees. Where fxsplit differs on purpose,
the docstring says how, and `docs/coming_from.md` tells those who come from there.
"""
