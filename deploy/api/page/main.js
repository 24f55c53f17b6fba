// The page: a conversation, its parameters, light and dark.

import { watchEngine } from "./engine.js";
import { render } from "./markdown.js";
import { Pace } from "./pace.js";
import { getJson, streamChat } from "./stream.js";
import { Aligner, Tinted } from "./tinted.js";

const KEY = "paceline-key"; // in sessionStorage: gone with the tab
const THEME = "paceline-theme"; // in localStorage
const IDEAS = [
  ["Repeat", "a poem with small changes", "Write a four line poem about the sea. Then write it again with one word changed in each line."],
  ["Explain", "why drafting is exact", "Explain in three short paragraphs why checking several guessed words at once is faster than writing them one by one."],
  ["Code", "a small function", "Write a Python function that returns the first n Fibonacci numbers, then show how to call it."],
];

const $ = (id) => document.getElementById(id);
const pace = new Pace();
const messages = []; // the conversation as the server is told it
let model = "";
let answering = null; // AbortController of the answer under way

const key = () => $("key").value.trim();

// Look

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const chosenTheme = () => localStorage.getItem(THEME);
setTheme(chosenTheme() ?? (prefersDark.matches ? "dark" : "light"));
prefersDark.addEventListener("change", ({ matches }) => chosenTheme() ?? setTheme(matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  setTheme(theme);
});

function openPanel(isOpen) {
  $("panel").classList.toggle("open", isOpen);
  $("panel-toggle").setAttribute("aria-expanded", isOpen);
}
$("panel-toggle").addEventListener("click", () => openPanel(!$("panel").classList.contains("open")));
$("scroll").addEventListener("click", () => openPanel(false));

function notify(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

// The server

async function connect() {
  try {
    const { data } = await getJson("v1/models", key());
    model = data[0].id;
    pace.maxLen = data[0].max_model_len ?? 0;
    const most = $("parameters").elements.max_tokens;
    if (pace.maxLen) most.value = Math.min(most.value, pace.maxLen >> 1); // the prompt needs room too
    $("model").textContent = $("model").title = model;
    notify("");
  } catch (error) {
    $("model").textContent = "not connected";
    if (error.status === 401) {
      notify("This server wants an API key. Enter it under Parameters.");
      openPanel(true);
      $("key").focus();
    } else {
      notify(`No answer from the server: ${error.message}`);
    }
  }
  updateSend();
}

$("key").value = sessionStorage.getItem(KEY) ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, key());
  connect();
  askEngine();
});

/** The parameters as fields of a request; an empty input leaves its field out. */
function parameters() {
  const form = new FormData($("parameters"));
  const number = (name) => (form.get(name) === "" ? undefined : Number(form.get(name)));
  return {
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    speculation: {
      enabled: form.has("speculation"),
      max_draft_tokens: number("max_draft_tokens"),
      steps: true,
    },
  };
}

for (const output of document.querySelectorAll("output[for]")) {
  const input = $(output.htmlFor.value);
  const show = () => (output.textContent = Number(input.value).toFixed(2));
  input.addEventListener("input", show);
  show();
}

// The conversation

class Answer {
  content = new Tinted();
  thought = new Tinted();
  #aligner = new Aligner();
  #node = part("article", "answer streaming");
  #text = part("div", "text");
  #foot = part("footer", "foot");
  #thoughtText = part("div", "text");
  #frame = 0;
  #tokens = 0;
  #drafts = 0;
  #accepted = 0;
  #began = performance.now();
  #firstAt = 0;

  constructor() {
    this.#node.setAttribute("aria-busy", "true");
    this.#text.append(part("p", ""));
    this.#node.append(this.#text, this.#foot);
    $("log").append(this.#node);
  }

  take(chunk) {
    const delta = chunk.choices[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.#aligner.said(this.thought, thought);
    if (delta.content) this.#aligner.said(this.content, delta.content);
    if (chunk.speculation) {
      this.#firstAt ||= performance.now();
      this.#aligner.step(chunk.speculation);
      this.#tokens += chunk.speculation.texts.length;
      this.#drafts += chunk.speculation.num_drafts;
      this.#accepted += chunk.speculation.num_accepted;
    }
    if (chunk.usage) this.#tokens = chunk.usage.completion_tokens;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  end(ending) {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    this.#node.classList.remove("streaming");
    this.#node.removeAttribute("aria-busy");
    const seconds = (performance.now() - this.#firstAt) / 1000;
    const facts = [`${this.#tokens} tokens`];
    if (this.#tokens > 1) facts.push(`${(this.#tokens / seconds).toFixed(1)} tokens/s`);
    if (this.#firstAt) facts.push(`first after ${Math.round(this.#firstAt - this.#began)} ms`);
    if (this.#drafts) facts.push(`${Math.round((100 * this.#accepted) / this.#drafts)}% of ${this.#drafts} drafts stood`);
    const copy = part("button", "quiet", "Copy");
    copy.type = "button";
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(this.content.text);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    this.#foot.append(copy, ...facts.map((fact) => part("span", "", fact)));
    if (ending) this.#foot.append(part("span", "fault", ending));
    keepInView();
  }

  #draw() {
    this.#frame = 0;
    const wasAtEnd = isAtEnd();
    if (this.thought.text) {
      if (!this.#thoughtText.isConnected) {
        const details = part("details", "thought");
        details.append(part("summary", "", "Reasoning"), this.#thoughtText);
        this.#text.before(details);
      }
      render(this.#thoughtText, this.thought);
    }
    if (this.content.text) render(this.#text, this.content);
    if (wasAtEnd) keepInView();
  }
}

function part(name, classes, text = "") {
  const node = document.createElement(name);
  if (classes) node.className = classes;
  node.textContent = text;
  return node;
}

const isAtEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;
const keepInView = () => $("scroll").scrollTo(0, $("scroll").scrollHeight);

async function ask(prompt) {
  notify("");
  $("welcome").hidden = true;
  messages.push({ role: "user", content: prompt });
  const question = part("div", "user", prompt);
  $("log").append(question);
  const answer = new Answer();
  keepInView();
  const ours = (answering = new AbortController());
  updateSend();
  const endPace = pace.begin();
  const system = $("parameters").elements.system.value.trim();
  const told = system ? [{ role: "system", content: system }, ...messages] : messages;
  let ending = "";
  try {
    for await (const chunk of streamChat({ model, messages: told, ...parameters() }, key(), ours.signal)) {
      if (chunk.speculation) pace.step(chunk.speculation);
      answer.take(chunk);
      if (chunk.choices[0]?.finish_reason === "length") ending = "cut off at the most tokens";
    }
  } catch (error) {
    ending = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") notify(error.message);
  }
  endPace();
  answer.end(ending);
  if (answering !== ours) return; // a new chat was begun meanwhile
  if (answer.content.text) messages.push({ role: "assistant", content: answer.content.text });
  else messages.pop(); // an unanswered question would be asked twice
  answering = null;
  updateSend();
}

// The composer

function updateSend() {
  $("send").hidden = answering !== null;
  $("stop").hidden = answering === null;
  $("send").disabled = !model || !$("prompt").value.trim();
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

$("prompt").addEventListener("input", () => {
  grow();
  updateSend();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (!prompt || !model || answering) return;
  if (!$("parameters").reportValidity()) return openPanel(true);
  $("prompt").value = "";
  grow();
  ask(prompt);
});
$("parameters").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => answering?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if ($("panel").classList.contains("open")) openPanel(false);
  else answering?.abort();
});
$("new").addEventListener("click", () => {
  answering?.abort();
  answering = null;
  messages.length = 0;
  $("log").replaceChildren();
  $("welcome").hidden = false;
  pace.reset();
  notify("");
  updateSend();
  $("prompt").focus();
});

for (const [verb, rest, prompt] of IDEAS) {
  const idea = part("button", "");
  idea.type = "button";
  idea.append(part("strong", "", verb), part("span", "", rest));
  idea.addEventListener("click", () => {
    $("prompt").value = prompt;
    $("composer").requestSubmit();
  });
  $("ideas").append(idea);
}

const askEngine = watchEngine(key);
connect();
