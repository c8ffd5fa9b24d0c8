"""Features of the guide and guards of the ledger are taken out, one at a time: a test must fail (`make mutants`)."""
