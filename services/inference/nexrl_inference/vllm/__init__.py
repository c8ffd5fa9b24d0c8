"""vLLM as the inference backend. Only `plugin` imports vLLM; it runs in vLLM's processes."""
