"""Policy versions: which one is committed, which replicas serve it, and the transaction that moves from one to the next."""
