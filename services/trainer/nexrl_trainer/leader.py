"""The learner of rank 0, and the loop in which the other ranks run its commands.

Before each method that communicates, rank 0 broadcasts a RankCommand. Then all ranks call that method.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nexrl.errors import InvalidArgumentError, TrainingFailedError
from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.train_batch import TrainBatch
from nexrl.train_batch_proto import decode_train_batch, encode_train_batch
from nexrl.v1 import rank_command_pb2 as pb
from nexrl.weights.gather import gathered_snapshot
from nexrl.weights.packing import Snapshot
from nexrl_trainer.checkpoint import load_checkpoint
from nexrl_trainer.checkpoint_writer import writing_thread
from nexrl_trainer.gang import end_for, wait_for_gang_end
from nexrl_trainer.held_state import HeldState
from nexrl_trainer.step import Learner
from nexrl_trainer.step_metrics import LossMetrics, OptimizerMetrics
from nexrl_trainer.tensor_slices import SavedTensors

_HOST = torch.device("cpu")


class Leader(Learner):
    """The learner of rank 0 of several. All calls must be made in one thread: their order is that of all ranks.

    An error that not all ranks raise ends this process, and so all ranks, with the exit code of the error: the ranks
    would no longer make the same calls. An example is code of the user that raises on one rank.
    """

    def forward(self, batch: TrainBatch) -> NDArray[np.float32]:
        """As on a single rank."""
        self.forward_pass.check_batch(batch)
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_FORWARD, tensors=encode_train_batch(batch))):
            return super().forward(batch)

    def forward_reference(self, batch: TrainBatch) -> NDArray[np.float32]:
        """As on a single rank."""
        self.forward_pass.check_batch(batch)
        verb = pb.RankCommand.VERB_FORWARD_REFERENCE
        with self._together(pb.RankCommand(verb=verb, tensors=encode_train_batch(batch))):
            return super().forward_reference(batch)

    def values(self, batch: TrainBatch) -> NDArray[np.float32]:
        """As on a single rank."""
        self.forward_pass.check_batch(batch)
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_VALUES, tensors=encode_train_batch(batch))):
            return super().values(batch)

    def forward_backward(
        self, batch: TrainBatch, algorithm: AlgorithmSpec | None = None, *, denominator: int | None = None
    ) -> LossMetrics:
        """As on a single rank, with the algorithm of the settings. A batch that is refused reaches no other rank."""
        if algorithm is not None or denominator is not None:
            raise InvalidArgumentError("forward_backward: algorithm, denominator: possible on a single rank only")
        self.check_batch(batch)
        command = pb.RankCommand(verb=pb.RankCommand.VERB_FORWARD_BACKWARD, tensors=encode_train_batch(batch))
        with self._together(command):
            return super().forward_backward(batch)

    def clear_gradients(self) -> None:
        """As on a single rank."""
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_CLEAR_GRADIENTS)):
            super().clear_gradients()

    def update(self) -> OptimizerMetrics:
        """As on a single rank."""
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_UPDATE)):
            return super().update()

    def end_step(self) -> None:
        """As on a single rank."""
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_END_STEP)):
            super().end_step()

    def snapshot(self, bucket_bytes: int, replaced: Snapshot | None = None, device: torch.device = _HOST) -> Snapshot:
        """As on a single rank."""
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_GATHER_WEIGHTS, bucket_bytes=bucket_bytes)):
            gathered = _gather_weights(self, bucket_bytes, replaced, device)
            assert gathered is not None
            return gathered.of_base(self.trained.base_digest)

    def hold_state(self, folder: Path) -> HeldState:
        """As on a single rank. The other ranks write theirs as soon as they have copied it."""
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_SAVE, checkpoint=str(folder))):
            return super().hold_state(folder)

    def restore(self, weights: SavedTensors, training: SavedTensors, step: int, path: Path) -> None:
        """As on a single rank. The other ranks read the checkpoint at `path`."""
        with self._together(pb.RankCommand(verb=pb.RankCommand.VERB_RESTORE, checkpoint=str(path))):
            super().restore(weights, training, step, path)

    @contextmanager
    def _together(self, command: pb.RankCommand) -> Iterator[None]:
        """Run the block on all ranks: it makes the call that `command` names. Raises what all ranks raise."""
        try:
            with wait_for_gang_end():
                self.ranks.broadcast(command.SerializeToString())
                yield
        except BaseException as error:
            if _is_of_all_ranks(error):
                raise
            end_for(error)


def run_commands(learner: Learner) -> None:
    """Run the commands of rank 0 until this process is killed. `learner` is that of another rank.

    Raises what the learner raises, unless all ranks raise it.
    """
    writing = writing_thread()  # not waited for at an error, which ends the process
    while True:
        _execute(learner, pb.RankCommand.FromString(learner.ranks.broadcast(None)), writing)


def _execute(learner: Learner, command: pb.RankCommand, writing: ThreadPoolExecutor) -> None:
    try:
        _call(learner, command, writing)
    except TrainingFailedError as error:
        if not _is_of_all_ranks(error):
            raise


def _call(learner: Learner, command: pb.RankCommand, writing: ThreadPoolExecutor) -> None:
    match command.verb:
        case pb.RankCommand.VERB_FORWARD | pb.RankCommand.VERB_FORWARD_REFERENCE | pb.RankCommand.VERB_VALUES:
            compute = {
                pb.RankCommand.VERB_FORWARD: learner.forward,
                pb.RankCommand.VERB_FORWARD_REFERENCE: learner.forward_reference,
                pb.RankCommand.VERB_VALUES: learner.values,
            }[command.verb]
            compute(decode_train_batch(command.tensors))
        case pb.RankCommand.VERB_FORWARD_BACKWARD:
            learner.forward_backward(decode_train_batch(command.tensors))
        case pb.RankCommand.VERB_CLEAR_GRADIENTS:
            learner.clear_gradients()
        case pb.RankCommand.VERB_UPDATE:
            learner.update()
        case pb.RankCommand.VERB_END_STEP:
            learner.end_step()
        case pb.RankCommand.VERB_GATHER_WEIGHTS:
            _gather_weights(learner, command.bucket_bytes)
        case pb.RankCommand.VERB_SAVE:
            folder = Path(command.checkpoint)
            writing.submit(learner.hold_state(folder).write, folder)  # rank 0 learns of its errors
        case pb.RankCommand.VERB_RESTORE:
            load_checkpoint(Path(command.checkpoint), learner)
        case unknown:
            raise AssertionError(f"rank 0 runs another version of NexRL: it sent verb {unknown}")


def _gather_weights(
    learner: Learner, bucket_bytes: int, replaced: Snapshot | None = None, device: torch.device = _HOST
) -> Snapshot | None:
    return gathered_snapshot(
        learner.trained.published(),
        policy_version=learner.step,
        bucket_bytes=bucket_bytes,
        is_sender=learner.ranks.rank == 0,
        replaced=replaced,
        device=device,
    )


def _is_of_all_ranks(error: BaseException) -> bool:
    """True for a loss or gradient that is not finite: all ranks find it. Code of the user may raise on one rank."""
    return isinstance(error, TrainingFailedError) and error.__cause__ is None
