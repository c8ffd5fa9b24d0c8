"""The process of a rank of a trainer other than rank 0. The main process of its replica starts it."""

import os
import signal
import threading
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from nexrl.errors import NexrlError
from nexrl.json_logging import configure_logging
from nexrl.log_files import log_path
from nexrl.malloc import keep_freed_memory
from nexrl.settings import Settings, load_settings
from nexrl.spec import ExperimentSpec, load_resolved
from nexrl_trainer.build import build_learner, device_of, prepare_torch
from nexrl_trainer.gang import end_for, reason_key, wait_for_gang_end
from nexrl_trainer.interface import local_address
from nexrl_trainer.leader import run_commands
from nexrl_trainer.rank_processes import RANK, RENDEZVOUS, SIZE
from nexrl_trainer.ranks import COLLECTIVE_SECONDS, Ranks, join_ranks


def main() -> None:
    """Join rank 0, and run its commands until it kills this process. Exits with the exit code of an error."""
    rank = int(os.environ[RANK])
    host, _, port = os.environ[RENDEZVOUS].rpartition(":")
    _pass_on_sigterm()
    keep_freed_memory()
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    try:
        _serve(rank, store, local_address(host, int(port)), load_settings())
    except BaseException as error:  # noqa: BLE001  # it ends this process
        store.set(reason_key(rank), str(error) if isinstance(error, NexrlError) else f"{type(error).__name__}: {error}")
        end_for(error)


def _serve(rank: int, store: TCPStore, address: str, settings: Settings) -> None:
    experiment = load_resolved(settings.experiment_file)
    kept_in = log_path(settings.run_dir, settings.instance) if settings.keeps_log else None
    configure_logging(experiment.metadata.name, settings.instance, settings.log_level, kept_in)
    spec = experiment.spec
    prepare_torch(spec)
    with wait_for_gang_end():
        ranks = _join(rank, _own_device(spec, rank), store, address)
        run_commands(build_learner(spec, experiment.folder, ranks))


def _join(rank: int, device: torch.device, store: TCPStore, address: str) -> Ranks:
    return join_ranks(rank, int(os.environ[SIZE]), device, store, address)


def _own_device(spec: ExperimentSpec, rank: int) -> torch.device:
    device = device_of(spec, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _pass_on_sigterm() -> None:
    """Have SIGTERM, which is blocked here, end the whole trainer with a checkpoint, as if rank 0 had received it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, too

    def wait() -> None:
        while True:
            signal.sigwait([signal.SIGTERM])
            os.kill(os.getppid(), signal.SIGTERM)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


if __name__ == "__main__":
    main()
