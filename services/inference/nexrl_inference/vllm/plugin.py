"""A backend of vLLM's weight-transfer interface. Runs in vLLM's workers.

The replica's own process receives a version beside the one being served (`nexrl.weights.receiver`), in memory that the
workers map. This backend loads it into the workers' model. So no worker waits for the network, and a sender that dies
leaves vLLM untouched.

vLLM finds `register` by the entry point of this package in the group `vllm.general_plugins`.
"""

import logging
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nexrl.parent_death import die_with_parent
from nexrl.weights.manifest import Manifest
from nexrl.weights.packing import named_chunks
from nexrl_inference.vllm.shared import LOADED, PLUGIN, manifest_from_json, open_shared, write_verdict

log = logging.getLogger(__name__)


def register() -> None:
    """Register the backend for `--weight-transfer-config '{"backend": "nexrl"}'`. Idempotent.

    vLLM calls this in each of its processes. A process that another one started is bound to it here, so that it ends
    with its parent: vLLM itself would leave it running.
    """
    parent = multiprocessing.parent_process()
    # Not if a fork server started it, in a vLLM that is not ours: then the parent is another process.
    if parent and parent.pid and (os.getppid() == parent.pid or not parent.is_alive()):
        die_with_parent(parent.pid)
    if PLUGIN not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(PLUGIN, StagedWeightsEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: nothing must be set up."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A version that has been received: the file that holds its packed buckets, and its manifest (JSON)."""

    path: str
    manifest: str


class StagedWeightsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a version into this worker's part of the model, whole or not at all."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """There is nothing to set up."""

    def start_weight_update(self) -> None:
        """Make room for the new weights, layer by layer."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version into this worker's part of the model, and write a verdict: LOADED, or why it failed.

        It raises nothing, see `write_verdict`. A manifest that lacks a tensor never gets here: the replica refuses it.
        """
        manifest, verdict = manifest_from_json(update_info.manifest), LOADED
        try:
            self._load(update_info.path, manifest)
        except Exception as error:
            log.exception("a version could not be loaded")
            verdict = f"{type(error).__name__}: {error}"
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        write_verdict(update_info.path, manifest, rank, verdict)

    def finish_weight_update(self) -> None:
        """Convert the new weights into the layout of the kernels.

        Also after a failure: the model then has the right layout, though wrong values, and can load the next version.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        # On a CPU vLLM packs the head when it is loaded. A tied head is not loaded, so it would keep its old values.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """There is nothing to release."""

    def _load(self, path: str, manifest: Manifest) -> None:
        digest = blake3()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, chunk, tensor in named_chunks(manifest, open_shared(path, manifest)):
                digest.update(chunk)
                yield name, tensor

        wanted = set(dict(self.model.named_parameters()))
        loaded = self.model.load_weights(tensors())
        if digest.hexdigest() != manifest.digest:
            raise RuntimeError(f"version {manifest.policy_version}: other bytes were loaded than were sent")
        if loaded is not None and (missing := sorted(wanted - set(loaded) - self._tied())):
            raise RuntimeError(f"version {manifest.policy_version}: nothing was sent for {', '.join(missing[:8])}")

    def _tied(self) -> set[str]:
        """Return the names of parameters that are other parameters under a second name."""
        is_tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return {name for name, _ in self.model.named_parameters() if name.startswith("lm_head.")} if is_tied else set()
