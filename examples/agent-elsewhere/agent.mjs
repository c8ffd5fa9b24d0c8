// The agent of agent.py in JavaScript: sessions over HTTP, and no package at all.
//
//   nexrl run examples/agent-elsewhere/experiment.yaml     says at which address agents open sessions
//   node examples/agent-elsewhere/agent.mjs http://127.0.0.1:PORT

import { randomUUID } from "node:crypto";
import { argv, env, stderr, stdout } from "node:process";
import { setTimeout as sleep } from "node:timers/promises";

const AT_ONCE = 32;
// A gateway that starts, or is started again, answers within this time.
const GATEWAY_SECONDS = Number(env.GATEWAY_SECONDS ?? 60);
const gateway = argv[2];

/** The gateway has answered that it will not do what was asked. */
class Refused extends Error {}

/** Sends JSON, and returns the answer's JSON. Throws Refused with the gateway's reason. */
async function post(url, body, headers = {}) {
  const answer = await fetch(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify(body),
  });
  if (answer.ok) return answer.json();
  const reason = `${answer.status}: ${await answer.text()}`;
  throw answer.status < 500 ? new Refused(reason) : new Error(reason);
}

/** A post that may be repeated: opening a session (by its request_id) and closing it. */
async function postUntilAnswered(url, body) {
  for (const until = Date.now() + 1000 * GATEWAY_SECONDS; ; await sleep(500)) {
    try {
      return await post(url, body);
    } catch (error) {
      if (error instanceof Refused || Date.now() > until) throw error;
    }
  }
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
    const { session } = await postUntilAnswered(`${gateway}/sessions`, { request_id: randomUUID(), wait_seconds: 20 });
    if (!session) continue; // nothing to do now
    const failed = (error) => ({ verdict: "VERDICT_ENV_ERROR", error: String(error) });
    const outcome = await runEpisode(session).catch(failed);
    await postUntilAnswered(`${gateway}/sessions/${session.session_id}/close`, outcome).catch(lost);
  }
}

/** The gateway was restarted, or the session ran out: its sample is granted again. */
function lost(error) {
  if (!(error instanceof Refused)) throw error;
  stderr.write(`an episode was lost: ${error.message}\n`);
}

const ended = await Promise.race(Array.from({ length: AT_ONCE }, () => runEpisodes().catch((error) => error)));
stdout.write(`the run is over: ${ended.cause ?? ended}\n`);
process.exit(0);
