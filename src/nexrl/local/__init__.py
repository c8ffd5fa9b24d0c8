"""One machine: the processes of an experiment as children of `nexrl run`."""
