"""Policy versions: which one is committed, which replicas serve it, and how the next one is brought to them."""
