"""Moves of policy versions and validation rounds."""

from nexrl_trajectory_pool.ledger.script import Moves


class Versions(Moves):
    """Moves of policy versions and validation rounds."""

    async def set_version(self, version: int) -> int:
        """Set the committed policy version, which moves the credit and never decreases. Returns the version held."""
        return int((await self._move("set_version", version=version))["version"])

    async def hold(self, version: int, hold_seconds: float) -> None:
        """Grant no training tasks while `version` is validated, for at most `hold_seconds`."""
        await self._move("hold", version=version, hold_seconds=hold_seconds)

    async def unhold(self, version: int) -> None:
        """Grant training tasks again."""
        await self._move("unhold", version=version)

    async def begin_round(self, version: int) -> None:
        """Grant the tasks of one validation round. Raises FailedPreconditionError while another one runs."""
        await self._move("begin_round", version=version)

    async def end_round(self, version: int) -> None:
        """Grant nothing more, and delete the round's samples; later results of it are fenced off."""
        await self._move("end_round", version=version)
