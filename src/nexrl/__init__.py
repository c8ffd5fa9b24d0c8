"""NexRL: reinforcement-learning post-training of language models as typed gRPC services."""

__version__ = "0.1.0"
