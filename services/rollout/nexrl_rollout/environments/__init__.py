"""Environments and rewards that come with the project; each is also an example of its kind."""
