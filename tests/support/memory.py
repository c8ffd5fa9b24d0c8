"""Memory that PyTorch allocates on the CPU, counted by its allocator."""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(function: Callable[[], object]) -> int:
    """Run `function`, and return the most bytes that it held at once beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())), default=0)
