"""The built-in inference engine: PyTorch and transformers, continuous batching."""
