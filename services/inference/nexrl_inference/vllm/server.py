"""A vLLM server as a child of this process, on a Unix socket that only this user can open.

vLLM's API key does not guard its routes that change weights or call functions in a worker; the socket does. The server
starts with random weights; weight sync delivers the real ones.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import torch

from nexrl import parent_death
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.models import build_config, save_architecture
from nexrl.spec.experiment import ExperimentSpec
from nexrl.spec.inference import VllmInference
from nexrl.weights.manifest import ITEM_BYTES
from nexrl_inference.vllm.shared import PLUGIN

START_SECONDS = 900.0
"""Longest time from start to the first answer: a large model is compiled first."""
STOP_SECONDS = 10.0
BLOCK_TOKENS = 128
STEP_TOKENS = 4096
"""Least limit of tokens per step on a CPU: of prompts, and after new weights."""
CPU_CACHE_BYTES = 2**30
"""Most memory for keys and values on a CPU. vLLM's default is a share of all memory."""
GPU_MEMORY_SHARE = 0.9
"""Of a GPU's memory, for all processes that share it. CUDA itself takes some for each of them."""

LEFT_OUT = ("NEXRL_", "VLLM_PLUGINS")
"""Variables that vLLM must not inherit: our settings, which include secrets, and a filter of its plugins."""
SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""A forked process would not load our plugin, which ends each of vLLM's processes with its parent."""
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ON_A_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling needs a C++ compiler. In an image without one the first request would end the engine.
    "TORCHDYNAMO_DISABLE": "1",
}


class VllmServer:
    """The running server: `post` and `open` reach its routes."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession, folder: Path) -> None:
        """`folder` holds the files that it was started with; `close` removes it."""
        self._process = process
        self._folder = folder
        self._session = session

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call a route with a JSON body. Returns the JSON of the answer, or None if it is empty.

        Raises InvalidArgumentError if vLLM refuses the request, UnavailableError if it fails or has ended.
        """
        try:
            async with self._session.post(f"http://vllm{path}", json=body or {}) as answer:
                text = await answer.text()
                if answer.status == 200:
                    return await answer.json(content_type=None) if text else None
        except aiohttp.ClientError as error:
            raise UnavailableError(f"vLLM does not answer: {error}") from None
        if answer.status in (400, 404, 422):
            raise InvalidArgumentError(f"vLLM refuses {path}: {text[:1000]}")
        raise UnavailableError(f"vLLM: {path}: {answer.status}: {text[:1000]}")

    @asynccontextmanager
    async def open(self, method: str, path: str, **arguments: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Call a route and yield the raw answer. Raises UnavailableError if the server has ended."""
        try:
            async with self._session.request(method, f"http://vllm{path}", **arguments) as answer:
                yield answer
        except aiohttp.ClientConnectionError as error:
            raise UnavailableError(f"vLLM does not answer: {error}") from None

    async def wait_until_it_answers(self) -> None:
        """Wait until the server answers. Raises UnavailableError if it ends, or START_SECONDS have passed."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._is_up():  # noqa: ASYNC110  # vLLM sends no event
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise UnavailableError(f"vLLM did not answer within {START_SECONDS:.0f} s; its log is above") from None

    def kill(self) -> None:
        """Kill the server and its workers at once; `wait_ended` then raises."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait_ended(self) -> None:
        """Wait until the server has ended, then raise UnavailableError."""
        code = await self._process.wait()
        raise UnavailableError(f"vLLM ended with code {code}; its log is above")

    async def close(self) -> None:
        """Stop it and its workers."""
        await self._session.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                self._process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
        self.kill()  # what is left of its process group
        await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _is_up(self) -> bool:
        if self._process.returncode is not None:
            await self.wait_ended()
        try:
            async with self._session.get("http://vllm/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


async def start_vllm(spec: ExperimentSpec, gpu_share: float = 1.0) -> VllmServer:
    """Start a server for the experiment's model, which takes at most `gpu_share` of its GPUs.

    Raises FailedPreconditionError when vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise FailedPreconditionError(
            "inference.backend: vllm is not installed here; `make setup-vllm` makes an environment with it, or choose "
            "backend builtin"
        )
    folder = Path(tempfile.mkdtemp(prefix="nexrl-vllm-"))
    await asyncio.to_thread(save_architecture, spec.model, folder / "model")
    socket = folder / "vllm.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())),
        *command(spec, folder / "model", socket, gpu_share),
        env=environment(spec),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    connector = aiohttp.UnixConnector(str(socket), limit=0, force_close=True)
    session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    return VllmServer(process, session, folder)


def environment(spec: ExperimentSpec) -> dict[str, str]:
    """Return the environment of the server: ours without LEFT_OUT, and settings of vLLM."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    variables = {
        **inherited,
        **SPAWNED,
        **QUIET,
        "OMP_NUM_THREADS": str(spec.inference.threads),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    return variables if _has_gpu() else {**variables, **ON_A_CPU}


def command(spec: ExperimentSpec, model: Path, socket: Path, gpu_share: float = 1.0) -> Sequence[str]:
    """Return the command line of the server."""
    inference = spec.inference
    assert isinstance(inference, VllmInference)
    return (
        # Not `vllm serve`: it asks for a distribution of the name vllm, which the CPU build is not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--uds", str(socket)),
        *("--model", str(model)),
        *("--served-model-name", spec.model.tag),
        *("--load-format", "dummy"),
        *("--dtype", spec.model.dtype),
        *("--max-model-len", str(spec.max_sequence_tokens)),
        *("--max-num-seqs", str(inference.max_rows)),
        *("--tensor-parallel-size", str(inference.tensor_parallel)),
        *("--data-parallel-size", str(inference.data_parallel)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", f'{{"backend": "{PLUGIN}"}}'),
        *("--generation-config", "vllm"),
        "--enable-scale-out",
        *(of_a_gpu(gpu_share) if _has_gpu() else on_a_cpu(spec)),
        *inference.vllm_args,
    )


def of_a_gpu(share: float) -> Sequence[str]:
    """Return the argument that limits the server's memory, if others use the GPU, too. `inference.vllmArgs` wins."""
    return () if share == 1 else ("--gpu-memory-utilization", f"{GPU_MEMORY_SHARE * share:.3f}")


def on_a_cpu(spec: ExperimentSpec) -> Sequence[str]:
    """Return the arguments that the server needs without a GPU."""
    step_tokens = max(STEP_TOKENS, spec.max_sequence_tokens + spec.inference.max_rows)
    return (
        "--enforce-eager",
        *("--kv-cache-memory-bytes", str(cpu_cache_bytes(spec))),
        # With chunked prefill vLLM draws a token for each chunk and then rewinds the request's random numbers. On a CPU
        # that fails and ends vLLM: "CPU Generator does not use offset".
        "--no-enable-chunked-prefill",
        *("--max-num-batched-tokens", str(step_tokens)),
    )


def cpu_cache_bytes(spec: ExperimentSpec) -> int:
    """Return the memory for keys and values on a CPU: enough for all rows at full length, at most CPU_CACHE_BYTES."""
    config = build_config(spec.model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * head_size * ITEM_BYTES[spec.model.dtype]
    rows = spec.inference.max_rows + 1  # one more, as vLLM wants whole blocks
    return int(min(CPU_CACHE_BYTES, rows * (spec.max_sequence_tokens + BLOCK_TOKENS) * token_bytes))


def _has_gpu() -> bool:
    return torch.cuda.is_available()
