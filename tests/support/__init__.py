"""Shared by tests: fixtures' machinery, builders, contract fakes. No test imports another test."""
