"""Each guard of the ledger is taken out, one at a time, and a test must fail: `make mutants`."""
