"""An agent in a process of its own: it copies digits, and is trained while it works.

nexrl run examples/agent-elsewhere/experiment.yaml    # says at which address agents open sessions
python examples/agent-elsewhere/agent.py ADDRESS
"""

import asyncio
import sys

import openai

from nexrl.agent_sessions import AgentSessions, open_agent_sessions
from nexrl.errors import NotFoundError, UnavailableError

AT_ONCE = 32


async def main(address: str) -> None:
    """Run episodes until the run is over."""
    client = openai.AsyncOpenAI(base_url="set for each session", api_key="-", max_retries=0)
    async with client, open_agent_sessions(address) as sessions:
        try:
            await asyncio.gather(*(run_episodes(sessions, client) for _ in range(AT_ONCE)))
        except UnavailableError as gone:
            sys.stdout.write(f"the run is over: {gone}\n")


async def run_episodes(sessions: AgentSessions, client: openai.AsyncOpenAI) -> None:
    """One episode after the other."""
    while True:
        try:
            async with sessions.session() as session:
                own = client.with_options(base_url=session.base_url, api_key=session.api_key)
                answer = await own.chat.completions.create(
                    model=session.model, messages=[{"role": "user", "content": session.task["prompt"]}]
                )
                session.score(right_digits(answer.choices[0].message.content or "", session.task["answer"]))
        except (openai.APIConnectionError, openai.NotFoundError, NotFoundError) as error:
            # The gateway was restarted, or the session ran out: its sample is granted again.
            sys.stderr.write(f"an episode was lost: {error}\n")


def right_digits(text: str, answer: str) -> float:
    """The share of digits that are copied."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
