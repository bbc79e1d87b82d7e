// Asks the server for its state while the page is visible, and shows it.

import { drawShares, drawSparkline } from "./charts.js";
import * as key from "./key.js";
import { ownRequestId, setChat, showPhase, startPromptBox } from "./prompt.js";
import { showRows } from "./tables.js";

const POLL_MS = 500;
const RETRY_MS = 1000;
const live = document.getElementById("live");
const status = document.getElementById("status");

const SETTINGS = {
  scheduler: "Strategy",
  max_num_seqs: "Sequences at most",
  max_num_batched_tokens: "Tokens at most",
  max_queue_delay: "A batch waits (s)",
  max_model_len: "Context (tokens)",
  max_waiting_requests: "Queue at most",
};

let timer = null;
let polling = false;
let pollAgain = false;

/** Ask now, or once more when the question that is under way has been answered. */
async function poll() {
  if (polling) {
    pollAgain = true;
    return;
  }
  clearTimeout(timer);
  if (document.hidden) return;
  if (key.isMissing()) {
    askForKey();
    return;
  }
  polling = true;
  const wait = await askOnce();
  polling = false;
  if (wait === null) return;
  timer = setTimeout(poll, pollAgain ? 0 : wait);
  pollAgain = false;
}

/** Show the server's state; returns the milliseconds until the next time, null for never. */
async function askOnce() {
  try {
    const response = await fetch("/dashboard/state", { headers: key.authorization() });
    if (response.status === 401) {
      key.refuse();
      askForKey();
      return null;
    }
    const body = await response.json();
    if (response.ok) {
      show(body);
      tell("good", "Live");
      return POLL_MS;
    }
    tell("busy", body.error.message);
  } catch {
    tell("bad", "The server does not answer; trying again");
  }
  return RETRY_MS;
}

function askForKey() {
  live.hidden = true;
  tell("busy", "Key needed");
  key.ask(poll);
}

function tell(kind, text) {
  status.dataset.kind = kind;
  if (status.textContent !== text) status.textContent = text; // each change is read out
}

function show(state) {
  live.hidden = false;
  document.title = `Shoal – ${state.model}`;
  put("model", `${state.model}, ${state.settings.scheduler} batching`);
  setChat(state.chat);
  showThroughput(state.throughput);
  showSlots(state);
  showBlocks(state.blocks);
  showRows(state, ownRequestId);
  showPhase([...state.running, ...state.waiting].find((row) => row.request_id === ownRequestId)?.phase);
  showLatency("ttft", state.ttft);
  showLatency("tpot", state.tpot);
  showCounters(state);
  showSettings(state.settings);
}

function showThroughput(throughput) {
  const minutes = Math.round((throughput.output_history.length * throughput.interval) / 60);
  for (const name of ["output", "prompt"]) {
    const history = throughput[`${name}_history`];
    const highest = Math.round(Math.max(...history));
    put(`${name}-rate`, count(throughput[name]));
    drawSparkline(
      document.getElementById(`${name}-chart`),
      history,
      `${name} tokens per second in the last ${minutes} minutes, at most ${highest}`,
    );
  }
}

function showSlots(state) {
  const most = state.settings.max_num_seqs;
  put("num-running", count(state.running.length));
  put("max-num-seqs", count(most));
  const description = `${state.running.length} of ${most} slots run`;
  drawShares(document.getElementById("slots-chart"), [state.running.length / most], description);
  const share = state.slot_utilization;
  put("slot-utilization", share === null ? "–" : `${Math.round(share * 100)} %`);
}

function showBlocks({ used, cached, free }) {
  const total = used + cached + free;
  put("blocks-used", count(used));
  put("blocks-total", count(total));
  put("blocks-cached", count(cached));
  put("blocks-free", count(free));
  drawShares(
    document.getElementById("blocks-chart"),
    [used / total, cached / total],
    `KV blocks: ${used} used, ${cached} cached, ${free} free`,
  );
}

function showLatency(id, percentiles) {
  const cells = document.getElementById(id).querySelectorAll("td");
  const texts = percentiles
    ? [...["p50", "p90", "p99"].map((name) => duration(percentiles[name])), count(percentiles.count)]
    : ["–", "–", "–", "0"];
  texts.forEach((text, index) => (cells[index].textContent = text));
}

function showCounters(state) {
  const { stop, length, abort, error } = state.finished;
  put("finished", count(stop + length));
  put("aborted", count(abort));
  put("failed", count(error));
  put("refused", count(Object.values(state.refused).reduce((sum, number) => sum + number, 0)));
  put("preemptions", count(state.num_preemptions));
}

function showSettings(settings) {
  const list = document.getElementById("settings");
  const shown = JSON.stringify(settings);
  if (list.dataset.shown === shown) return; // they change only when another server has started
  list.dataset.shown = shown;
  list.replaceChildren();
  for (const [name, label] of Object.entries(SETTINGS)) {
    if (!(name in settings)) continue;
    const value = settings[name];
    const pair = document.createElement("div");
    pair.append(element("dt", label), element("dd", typeof value === "number" ? count(value) : value));
    list.append(pair);
  }
}

function element(name, text) {
  const created = document.createElement(name);
  created.textContent = text;
  return created;
}

function put(id, text) {
  document.getElementById(id).textContent = text;
}

function count(number) {
  const digits = Number.isInteger(number) || number >= 10 ? 0 : 1;
  return number.toLocaleString("en", { maximumFractionDigits: number < 1 ? 2 : digits });
}

function duration(seconds) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

document.addEventListener("visibilitychange", poll);
startPromptBox(poll);
poll();
