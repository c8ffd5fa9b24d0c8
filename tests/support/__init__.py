"""Code that tests share: fixtures, builders and contract fakes. No test module imports another test module."""
