"""A vLLM server as a child of this process, on a Unix socket that only this user can open.

vLLM's routes that change weights or call anything in a worker are not guarded by its API key; nobody else can reach
them here. The weights come by weight sync: the server starts with random ones, and is told nothing else.
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

from nexrl import bound
from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.models import build_config, save_architecture
from nexrl.spec.experiment import ExperimentSpec
from nexrl.weights.manifest import ITEM_BYTES
from nexrl.weights.shared import PLUGIN

START_SECONDS = 900.0
"""Longest time until it answers: a large model is compiled first."""
STOP_SECONDS = 10.0
BLOCK_TOKENS = 128
STEP_TOKENS = 4096
"""Tokens that a step on a CPU computes at least, if there are so many: of prompts and after new weights."""
CPU_CACHE_BYTES = 2**30
"""Most memory for keys and values on a CPU, where vLLM would take a share of all there is."""

LEFT_OUT = ("NEXRL_", "VLLM_PLUGINS")
"""Of our environment: our settings, which include secrets, and what would keep vLLM from loading our plugin."""
SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""A fork would not load the plugin again, which binds each of vLLM's processes to the one that started it."""
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ON_A_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Compiling needs a C++ compiler, which an image may not have: without one the first request would end the engine.
    "TORCHDYNAMO_DISABLE": "1",
}


class VllmServer:
    """The running server: `post` and `open` reach its routes."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession, folder: Path) -> None:
        """`folder`: what it was started with, removed when it is closed."""
        self._process = process
        self._folder = folder
        self._session = session

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call a route with a JSON body; gives what it answers (JSON, or None).

        Raises InvalidArgumentError when it refuses the request, UnavailableError when it fails or is gone.
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
        """Call a route, whatever it takes and answers. Raises UnavailableError when the server is gone."""
        try:
            async with self._session.request(method, f"http://vllm{path}", **arguments) as answer:
                yield answer
        except aiohttp.ClientConnectionError as error:
            raise UnavailableError(f"vLLM does not answer: {error}") from None

    async def wait_until_it_answers(self) -> None:
        """Return when it is up. Raises UnavailableError when it has ended, or is not up within START_SECONDS."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._is_up():  # noqa: ASYNC110  # it tells nobody
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise UnavailableError(f"vLLM did not answer within {START_SECONDS:.0f} s; its log is above") from None

    def kill(self) -> None:
        """End it at once, with its workers; `wait_ended` tells."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait_ended(self) -> None:
        """Raise UnavailableError when the server has ended by itself."""
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


async def start_vllm(spec: ExperimentSpec) -> VllmServer:
    """Start a server for the experiment's model. Raises FailedPreconditionError when vLLM is not installed."""
    if find_spec("vllm") is None:
        raise FailedPreconditionError(
            "inference.backend: vllm is not installed here; `make setup-vllm` makes an environment with it, or choose "
            "backend builtin"
        )
    folder = Path(tempfile.mkdtemp(prefix="nexrl-vllm-"))
    await asyncio.to_thread(save_architecture, spec.model, folder / "model")
    socket = folder / "vllm.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", bound.__file__, str(os.getpid())),
        *command(spec, folder / "model", socket),
        env=environment(spec),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    connector = aiohttp.UnixConnector(str(socket), limit=0, force_close=True)
    session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    return VllmServer(process, session, folder)


def environment(spec: ExperimentSpec) -> dict[str, str]:
    """What the server finds in its environment: most of ours."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    variables = {
        **inherited,
        **SPAWNED,
        **QUIET,
        "OMP_NUM_THREADS": str(spec.inference.threads),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    return variables if _has_gpu() else {**variables, **ON_A_CPU}


def command(spec: ExperimentSpec, model: Path, socket: Path) -> Sequence[str]:
    """The server's command line."""
    inference = spec.inference
    return (
        # Not `vllm serve`: it asks for a distribution of the name vllm, which the CPU build is not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--uds", str(socket)),
        *("--model", str(model)),
        *("--served-model-name", spec.model.tag),
        *("--load-format", "dummy"),
        *("--dtype", spec.model.dtype),
        *("--max-model-len", str(row_tokens(spec))),
        *("--max-num-seqs", str(inference.max_rows)),
        *("--tensor-parallel-size", str(inference.tensor_parallel)),
        *("--data-parallel-size", str(inference.data_parallel)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", f'{{"backend": "{PLUGIN}"}}'),
        *("--generation-config", "vllm"),
        "--enable-scale-out",
        *(() if _has_gpu() else on_a_cpu(spec)),
        *inference.vllm_args,
    )


def on_a_cpu(spec: ExperimentSpec) -> Sequence[str]:
    """What the server needs to be told where there is no GPU."""
    step_tokens = max(STEP_TOKENS, row_tokens(spec) + spec.inference.max_rows)
    return (
        "--enforce-eager",
        *("--kv-cache-memory-bytes", str(cpu_cache_bytes(spec))),
        # A prompt in parts draws a token for each part, which vLLM takes back from the random numbers of a seed. On a
        # CPU it cannot, and ends: "CPU Generator does not use offset".
        "--no-enable-chunked-prefill",
        *("--max-num-batched-tokens", str(step_tokens)),
    )


def row_tokens(spec: ExperimentSpec) -> int:
    """Longest sequence, prompt and completion together."""
    positions = spec.model.scratch.max_positions if spec.model.scratch else spec.inference.max_tokens_per_row
    return min(spec.inference.max_tokens_per_row, positions)


def cpu_cache_bytes(spec: ExperimentSpec) -> int:
    """Memory for keys and values on a CPU: what all rows need at their longest, within CPU_CACHE_BYTES."""
    config = build_config(spec.model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * head_size * ITEM_BYTES[spec.model.dtype]
    rows = spec.inference.max_rows + 1  # one more, as vLLM wants whole blocks
    return int(min(CPU_CACHE_BYTES, rows * (row_tokens(spec) + BLOCK_TOKENS) * token_bytes))


def _has_gpu() -> bool:
    return torch.cuda.is_available()
