"""An NCCL communicator that never blocks, over the C interface of the libnccl that PyTorch has loaded.

Not ProcessGroupNCCL: its watchdog ends the process after an error, unless environment variables change that for all
groups of the process, which in a trainer include those of FSDP. Not vLLM's PyNcclCommunicator: it blocks while it
connects, and the trainer has no vLLM. Signatures and constants are those of nccl.h (2.14 and later).
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from nexrl.errors import FailedPreconditionError

_LIBRARY = "libnccl.so.2"
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400
"""The first version with `blocking`. A library that is newer takes its own defaults for all later fields."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_SIGNATURES = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
    "ncclBroadcast": (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ),
    "ncclCommAbort": (ctypes.c_void_p,),
}


class NcclError(RuntimeError):
    """NCCL reported an error: a member is gone, or cannot be connected."""


class Communicator:
    """One rank of a group. Poll `is_idle` after the constructor and after `broadcast`; then the next call may follow.

    Use it in one thread at a time. `abort` is the last call, and is needed: nothing else frees what NCCL holds.
    """

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        """Begin to connect to the other ranks, which have the same `unique_id`."""
        self._library = library()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._end: torch.cuda.Event | None = None
        self._handle = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0)
        name = _UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            begun = self._library.ncclCommInitRankConfig(
                ctypes.byref(self._handle), world_size, name, rank, ctypes.byref(config)
            )
        self._check(begun)

    def is_idle(self) -> bool:
        """Return whether all that was begun is done, on the device too. Raises NcclError if it failed."""
        state = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        self._check(state.value)
        if state.value == _IN_PROGRESS:  # not yet in the stream, so an event would come before it
            return False
        if self._end is None:
            self._end = self._stream.record_event()
        return bool(self._end.query())

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """Begin to send `buffer` (on the device) from rank `root` to all others, which receive into theirs."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still be filling the buffer
        buffer.record_stream(self._stream)  # after an abort, its memory is used again only when the kernel has ended
        self._end = None
        address, stream = buffer.data_ptr(), self._stream.cuda_stream
        with torch.cuda.device(self._device):
            begun = self._library.ncclBroadcast(address, address, buffer.nbytes, _UINT8, root, self._handle, stream)
        self._check(begun)

    def abort(self) -> None:
        """End what runs, on this side only, and free the communicator. The other ranks notice at their deadlines."""
        if self._handle:
            self._library.ncclCommAbort(self._handle)

    def _check(self, result: int) -> None:
        _check(self._library, result)


def new_unique_id() -> bytes:
    """Return a new name under which the ranks of a communicator find each other."""
    unique_id = _UniqueId()
    _check(library(), library().ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id)


def version() -> int:
    """Return the version of the library: 23203 is 2.32.3."""
    number = ctypes.c_int()
    _check(library(), library().ncclGetVersion(ctypes.byref(number)))
    return number.value


@cache
def library() -> ctypes.CDLL:
    """Return the library. Raises FailedPreconditionError if this process has none that is new enough."""
    try:
        loaded = ctypes.CDLL(_LIBRARY)  # by this name the loader finds what PyTorch has loaded already
        for name, arguments in _SIGNATURES.items():
            getattr(loaded, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise FailedPreconditionError(
            f"NCCL: {error}; install PyTorch for CUDA, or set weightSync.transport: gloo"
        ) from None
    loaded.ncclGetErrorString.argtypes, loaded.ncclGetErrorString.restype = (ctypes.c_int,), ctypes.c_char_p
    return loaded


def _check(loaded: ctypes.CDLL, result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        raise NcclError(f"NCCL: {loaded.ncclGetErrorString(result).decode()}")
