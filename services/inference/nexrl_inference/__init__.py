"""The built-in PyTorch inference engine, and (in `server`) the service around it."""

from nexrl_inference.engine import Engine
from nexrl_inference.engine_thread import EngineThread
from nexrl_inference.requests import Completion, FinishReason, GenerationRequest, GenerationResult
from nexrl_inference.scheduler import Limits

__all__ = ["Completion", "Engine", "EngineThread", "FinishReason", "GenerationRequest", "GenerationResult", "Limits"]
