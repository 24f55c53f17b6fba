// What the engine says of itself in /metrics, every few seconds while somebody looks.

import { headers } from "./stream.js";

const PERIOD_MS = 2000;
const SAMPLE = /^([a-z_:]+)(?:\{(.*)\})? (\S+)$/i;

export function watchEngine(key) {
  let isAsking = false;
  async function ask() {
    if (document.hidden || isAsking) return;
    isAsking = true;
    try {
      const response = await fetch("metrics", { headers: headers(key()) });
      if (response.ok) show(await response.text());
    } catch {
      // the chat says so when the server is gone
    } finally {
      isAsking = false;
    }
  }
  ask();
  setInterval(ask, PERIOD_MS);
  return ask;
}

function show(text) {
  const sums = {};
  const states = {};
  for (const line of text.split("\n")) {
    const sample = SAMPLE.exec(line);
    if (!sample) continue;
    const [, name, labels, value] = sample;
    sums[name] = (sums[name] ?? 0) + Number(value);
    const state = name === "paceline:shard_up" && Number(value) && /state="(\w+)"/.exec(labels)?.[1];
    if (state) states[state] = (states[state] ?? 0) + 1;
  }
  const used = sums["paceline:num_pages"] - sums["paceline:num_free_pages"];
  put("engine-requests", `${sums["vllm:num_requests_running"]} running, ${sums["vllm:num_requests_waiting"]} waiting`);
  put("engine-pages", `${used.toLocaleString("en")} of ${sums["paceline:num_pages"].toLocaleString("en")}`);
  const told = Object.entries(states).map(([state, count]) => (count > 1 ? `${count} ${state}` : state));
  put("engine-drafter", told.join(", ") || "none");
  put("engine-context", `${(sums["paceline:context_tokens"] ?? 0).toLocaleString("en")} tokens`);
}

function put(id, text) {
  document.getElementById(id).textContent = text;
}
