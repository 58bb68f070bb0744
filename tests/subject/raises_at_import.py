"""A module that cannot be imported, for the command's tests."""

1 / 0  # noqa: B018
