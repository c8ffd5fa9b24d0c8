"""Makes a training step last LONG_TAIL_TRAIN_SECONDS, as on an accelerator: Python imports this file when it starts.

The step itself is done, and the rest of its time slept. `async_vs_sync.py` puts this folder on PYTHONPATH; only the
trainer's process is changed.
"""

import os
import sys
import time


def slow_down(seconds: float) -> None:
    """Make every step of the learner take `seconds`."""
    # Here, because every other process of the run reads this file too.
    from nexrl.train_batch import TrainBatch
    from nexrl_trainer.step import Learner
    from nexrl_trainer.step_metrics import StepMetrics

    train = Learner.train

    def as_on_an_accelerator(learner: Learner, batch: TrainBatch) -> StepMetrics:
        ends = time.monotonic() + seconds
        metrics = train(learner, batch)
        time.sleep(max(0.0, ends - time.monotonic()))
        return metrics

    Learner.train = as_on_an_accelerator  # type: ignore[assignment, method-assign]


if "trainer" in sys.orig_argv:
    slow_down(float(os.environ["LONG_TAIL_TRAIN_SECONDS"]))
