// The box that sends a prompt, streams its answer and can stop it.

import { authorization } from "./key.js";

const TEMPERATURE = 0.7;
const form = document.getElementById("prompt-form");
const prompt = document.getElementById("prompt");
const maxTokens = document.getElementById("max-tokens");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const answer = document.getElementById("answer");
const status = document.getElementById("answer-status");

let running = null; // the AbortController of the request that runs
let isChat = true;
let unshown = ""; // of the answer, until the next frame

/** The id of the request sent last, to find it in the batch. */
export let ownRequestId = null;

/** Tell whether the model answers chats; called with each state of the server. */
export function setChat(value) {
  isChat = value;
}

/** Tell where the own request is: "waiting", "prefill", "decode" or null. */
export function showPhase(phase) {
  const words = { waiting: "Waiting in the queue", prefill: "Its prompt is being computed", decode: "Answering" };
  if (running && words[phase]) say(words[phase]);
}

/** Make the box work; `onSend` is called when a request has been sent. */
export function startPromptBox(onSend) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) run(onSend);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", () => running?.abort());
}

async function run(onSend) {
  running = new AbortController();
  ownRequestId = `dashboard-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  setRunning(true);
  answer.textContent = "";
  unshown = "";
  answer.hidden = true; // until there is some
  say("Sent");
  try {
    const request = post(running.signal);
    onSend();
    say(await readAnswer(await request));
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped" : `Failed: ${error.message}`);
  } finally {
    running = null;
    setRunning(false);
  }
}

function post(signal) {
  const common = {
    max_tokens: maxTokens.valueAsNumber,
    temperature: TEMPERATURE,
    stream: true,
    stream_options: { include_usage: true },
  };
  const chat = { ...common, messages: [{ role: "user", content: prompt.value }] };
  const completion = { ...common, prompt: prompt.value };
  return fetch(isChat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Request-Id": ownRequestId, ...authorization() },
    body: JSON.stringify(isChat ? chat : completion),
    signal,
  });
}

/** Show the stream as it comes; returns how it ended, in words. */
async function readAnswer(response) {
  if (!response.ok) throw new Error((await response.json()).error.message);
  let reason = null;
  let usage = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      append(choice.delta?.content ?? choice.text ?? "");
      reason = choice.finish_reason ?? reason;
    }
    usage = event.usage ?? usage;
  }
  const limit = reason === "length" ? ", cut at the limit" : "";
  return `Finished: ${usage.completion_tokens} tokens${limit}`;
}

/** Add to the answer; many tokens may come between two frames, which are drawn at once. */
function append(text) {
  if (!unshown && text) requestAnimationFrame(showAnswer);
  unshown += text;
}

/** Show what has come, and keep its end in view for those who haven't scrolled away from it. */
function showAnswer() {
  if (!unshown) return; // another request has been sent
  const text = unshown;
  unshown = "";
  const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 30;
  answer.hidden = false;
  answer.append(text);
  if (isAtEnd) answer.scrollTop = answer.scrollHeight;
}

/** The events of a stream, parsed. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function setRunning(value) {
  const hadFocus = document.activeElement === stop;
  send.disabled = value;
  stop.disabled = !value;
  if (!value && hadFocus) prompt.focus(); // a disabled button would lose the keyboard's place
}

function say(text) {
  if (status.textContent !== text) status.textContent = text; // each change is read out
}
