// The agent of agent.py in JavaScript: sessions over HTTP, and no package at all.
//
//   nexrl run examples/agent-elsewhere/experiment.yaml     says at which address agents open sessions
//   node examples/agent-elsewhere/agent.mjs http://127.0.0.1:PORT

import { randomUUID } from "node:crypto";
import { argv, stdout } from "node:process";

const AT_ONCE = 32;
const gateway = argv[2];

/** Sends JSON, and returns the answer's JSON. Throws an Error with the gateway's reason. */
async function post(url, body, headers = {}) {
  const answer = await fetch(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify(body),
  });
  const content = await answer.json();
  if (!answer.ok) throw new Error(`${answer.status}: ${content.error.message}`);
  return content;
}

/** One episode: ask the policy once, and score how many digits it has copied. */
async function runEpisode(session) {
  const { prompt, answer } = session.task.item;
  const request = { model: session.model, messages: [{ role: "user", content: prompt }] };
  const reply = await post(`${session.base_url}/chat/completions`, request, { Authorization: `Bearer ${session.api_key}` });
  const text = reply.choices[0].message.content ?? "";
  const right = [...answer].filter((digit, place) => digit === text[place]).length;
  return { verdict: "VERDICT_OK", reward: right / answer.length };
}

/** Opens one session after the other, until the gateway has gone. */
async function runEpisodes() {
  for (;;) {
    const { session } = await post(`${gateway}/sessions`, { request_id: randomUUID(), wait_seconds: 20 });
    if (!session) continue; // nothing to do now
    const failed = (error) => ({ verdict: "VERDICT_ENV_ERROR", error: String(error) });
    await post(`${gateway}/sessions/${session.session_id}/close`, await runEpisode(session).catch(failed));
  }
}

const ended = await Promise.race(Array.from({ length: AT_ONCE }, () => runEpisodes().catch((error) => error)));
stdout.write(`the run is over: ${ended.cause ?? ended}\n`);
process.exit(0);
