"""What we rely on inside vLLM, beyond its documented interface: one row for each place that an upgrade may change.

`tests/vllm/test_vllm_internals.py` finds each row in the source of the installed vLLM, without importing it. What the
rows do together is proven by the other tests of that folder.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Internal:
    """`texts` must be in the Python source at `place`, a file or folder of the package vllm. Else `breaks` is true."""

    place: str
    texts: tuple[str, ...]
    used_by: str
    breaks: str


INTERNALS = (
    Internal(
        "plugins/__init__.py",
        ('"vllm.general_plugins"', "def load_general_plugins"),
        "plugin.py: register",
        "vLLM does not find our backend of weight transfer, and its processes do not end with their parent",
    ),
    Internal(
        "distributed/weight_transfer/factory.py",
        ("class WeightTransferEngineFactory", "_registry: dict[str,", "def register_engine("),
        "plugin.py: register",
        "our backend cannot be registered, or is registered twice",
    ),
    Internal(
        "distributed/weight_transfer/base.py",
        (
            "class WeightTransferInitInfo(",
            "class WeightTransferUpdateInfo(",
            "class WeightTransferEngine(",
            "def init_transfer_engine(self, init_info",
            "def start_weight_update(self) -> None",
            "def receive_weights(self, update_info: TUpdateInfo) -> None",
            "def finish_weight_update(self) -> None",
            "def shutdown(self) -> None",
            "self.model_config",
            "self.parallel_config",
        ),
        "plugin.py: StagedWeightsEngine",
        "our backend overrides methods that vLLM does not call, or reads attributes that are not there",
    ),
    Internal(
        "model_executor/model_loader/reload",
        ("def initialize_layerwise_reload(model", "def finalize_layerwise_reload("),
        "plugin.py: start_weight_update, finish_weight_update",
        "new weights are not converted into the layout of the kernels",
    ),
    Internal(
        "model_executor/layers/vocab_parallel_embedding.py",
        ("class ParallelLMHead(", "quant_method", "def process_weights_after_loading("),
        "plugin.py: finish_weight_update",
        "a tied head keeps its old values on a CPU",
    ),
    Internal(
        "config/parallel.py",
        ("data_parallel_index: int", "world_size: int", "\n    rank: int"),
        "plugin.py: receive_weights",
        "workers write their verdicts to each other's places",
    ),
    Internal(
        "entrypoints",
        (
            '"/pause"',
            '"/resume"',
            '"/start_weight_update"',
            '"/update_weights"',
            '"/finish_weight_update"',
            "clear_cache",
            "weight_version: ",
        ),
        "engine.py: _load",
        "a version cannot be loaded, or is served under the number of another one",
    ),
    Internal(
        "entrypoints/scale_out",
        ('"/inference/v1/generate"', "token_ids: list[int]", "weight_versions"),
        "engine.py: _draw",
        "nothing can be sampled by token ids, or tokens do not name their policy version",
    ),
    Internal(
        "entrypoints",
        ("enable_scale_out: bool", "uds: str"),
        "server.py: command",
        "the server refuses our arguments",
    ),
    Internal(
        "entrypoints/openai/api_server.py",
        ('if __name__ == "__main__":\n    ',),
        "server.py: command",
        "the module is no command any more, so no server starts",
    ),
    Internal(
        "v1/engine/core.py",
        ("if self._reject_add_in_shutdown(req):",),
        "engine.py: _draw",
        "with weightSync.inFlight wait or abort, requests that arrive during a sync are refused, not queued",
    ),
    Internal(
        "engine/arg_utils.py",
        (
            '"--logprobs-mode"',
            '"--weight-transfer-config"',
            '"--kv-cache-memory-bytes"',
            '"--gpu-memory-utilization"',
            '"--generation-config"',
            '"--enable-chunked-prefill"',
            '"--max-num-batched-tokens"',
            '"--enforce-eager"',
        ),
        "server.py: command, of_a_gpu, on_a_cpu",
        "the server refuses our arguments",
    ),
    Internal(
        "config/model.py",
        ('"processed_logprobs"',),
        "server.py: command",
        "log-probabilities are not those of the distribution that tokens are drawn from",
    ),
    Internal("config/load.py", ('"dummy"',), "server.py: command", "the server looks for weights that are not there"),
    Internal(
        "envs.py",
        ('"VLLM_SERVER_DEV_MODE"', '"VLLM_WORKER_MULTIPROC_METHOD"', '"VLLM_CPU_OMP_THREADS_BIND"', '"VLLM_PLUGINS"'),
        "server.py: environment",
        "the routes for weights are missing, or workers are forked, pinned or without our plugin",
    ),
)
