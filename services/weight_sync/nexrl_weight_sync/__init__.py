"""Policy versions: which one is committed, which replicas serve it, and the transaction that commits the next one."""
