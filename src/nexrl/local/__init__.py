"""Runs an experiment on one machine, with its services as child processes of `nexrl run`; reads runs afterwards."""
