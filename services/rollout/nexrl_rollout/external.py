"""rollout.type external: agents of other processes run the episodes, each in a session that they open and close."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from nexrl.activity import ActivityTracker
from nexrl.environment import Outcome
from nexrl.errors import NotFoundError
from nexrl.rollout_worker import NotAttemptedError
from nexrl.spec.experiment import Experiment
from nexrl.v1.trajectory_pb2 import SampleResult
from nexrl_rollout.agent import Episode, EpisodeWorker
from nexrl_rollout.gateway import CLOSED, LOST, Gateway


@dataclass(frozen=True)
class OpenEpisode:
    """An episode that an agent has. Its result is set when the agent closes its session."""

    episode: Episode
    request_id: str
    result: asyncio.Future[SampleResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class _Asker:
    """An agent that waits for an episode."""

    request_id: str
    episode: asyncio.Future[OpenEpisode] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ExternalWorker(EpisodeWorker):
    """Hands each episode to an agent that waits for one. No sample is leased that nobody waits for."""

    def __init__(self, gateway: Gateway, experiment: Experiment, activity: ActivityTracker) -> None:
        super().__init__(gateway, experiment)
        self._activity = activity
        self._askers: deque[_Asker] = deque()
        self._is_asked = asyncio.Event()
        self._open: dict[str, OpenEpisode] = {}

    async def wanted(self, most: int) -> int:
        """Wait until an agent waits for an episode."""
        await asyncio.sleep(0)  # episodes that were leased before take their agents first
        if not self._askers:
            self._is_asked.clear()
            with self._activity.in_flight("wait_agent", waiting_on="an agent that opens a session"):
                await self._is_asked.wait()
        return min(most, len(self._askers))

    async def open(self, request_id: str, wait_seconds: float) -> OpenEpisode | None:
        """Wait for an episode; None if there is none in time. A repeated request gets its episode again."""
        known = next((found for found in self._open.values() if found.request_id == request_id), None)
        if known is not None:
            return known
        asker = _Asker(request_id)
        self._askers.append(asker)
        self._is_asked.set()
        try:
            await asyncio.wait([asker.episode], timeout=wait_seconds)
            return asker.episode.result() if asker.episode.done() else None
        except asyncio.CancelledError:  # the agent has gone, and has not seen its episode
            if asker.episode.done() and not (result := asker.episode.result().result).done():
                result.set_exception(NotAttemptedError("the agent that asked for it has gone"))
            raise
        finally:
            if asker in self._askers:
                self._askers.remove(asker)

    def close_session(self, session_id: str, outcome: Outcome) -> None:
        """End an episode. Nothing happens if its agent has ended it before.

        Raises NotFoundError if it ended otherwise, InvalidArgumentError if the outcome does not fit what was served.
        """
        found = self._open.get(session_id)
        if found is None:
            why = self._gateway.why_ended(session_id)
        elif found.result.cancelled():
            why = LOST  # it is among the open ones until its task has ended
        elif found.result.done():
            why = CLOSED
        else:
            found.result.set_result(found.episode.result(outcome))
            return
        if why != CLOSED:
            raise NotFoundError(f"session_id: {why}")

    async def _run(self, episode: Episode) -> SampleResult:
        if not self._askers:
            raise NotAttemptedError("the agent that asked for it has gone")
        asker = self._askers.popleft()
        opened = self._open[episode.session.id] = OpenEpisode(episode, asker.request_id)
        asker.episode.set_result(opened)
        try:
            with self._activity.in_flight("episode", waiting_on="an agent"):
                return await opened.result
        finally:
            del self._open[episode.session.id]
