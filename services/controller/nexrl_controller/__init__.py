"""The controller: the life of one experiment, activity and errors of its components, validation, metrics."""
