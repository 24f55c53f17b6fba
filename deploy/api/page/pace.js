// How fast it goes and what drafting gives: numbers and two small charts, from the steps of the stream.

const WINDOW_MS = 2000; // that tokens per second look back
const TREND_MS = 250; // between two points of the trend
const TREND_POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);

export class Pace {
  maxLen = 0; // tokens that the model can hold
  #drafted = []; // by slot, over the conversation
  #stood = [];
  #steps = []; // [time, tokens] within the window
  #trend = [];
  #numSteps = 0;
  #numTokens = 0;
  #timer = 0;

  constructor() {
    this.reset();
  }

  /** A new conversation. */
  reset() {
    this.#drafted = [];
    this.#stood = [];
    this.#numSteps = this.#numTokens = 0;
    this.#trend = [];
    this.#show({ num_drafts: 0, context_len: 0 });
    $("speed").textContent = "0.0";
    $("trend").firstElementChild.setAttribute("d", "");
  }

  /** An answer begins; returns what is to be called when it ends. */
  begin() {
    this.#steps = [];
    this.#timer = setInterval(() => this.#tick(), TREND_MS);
    return () => {
      clearInterval(this.#timer);
      this.#tick();
    };
  }

  step(step) {
    this.#steps.push([performance.now(), step.texts.length]);
    this.#numSteps++;
    this.#numTokens += step.texts.length;
    for (let slot = 0; slot < step.num_drafts; slot++) {
      this.#drafted[slot] = (this.#drafted[slot] ?? 0) + 1;
      this.#stood[slot] = (this.#stood[slot] ?? 0) + (slot < step.num_accepted);
    }
    this.#show(step);
  }

  #tick() {
    const now = performance.now();
    while (this.#steps.length > 2 && now - this.#steps[0][0] > WINDOW_MS) this.#steps.shift();
    const [first, ...rest] = this.#steps;
    if (!rest.length) return;
    const tokens = rest.reduce((sum, [, count]) => sum + count, 0);
    const speed = (1000 * tokens) / (rest.at(-1)[0] - first[0] || 1);
    $("speed").textContent = speed < 100 ? speed.toFixed(1) : speed.toFixed(0);
    this.#trend = [...this.#trend, speed].slice(-TREND_POINTS);
    const most = Math.max(...this.#trend);
    const points = this.#trend.map((value, i) => `${(100 * i) / (TREND_POINTS - 1)} ${28 - (26 * value) / most}`);
    $("trend").firstElementChild.setAttribute("d", `M${points.join("L")}`);
  }

  #show({ num_drafts, context_len }) {
    $("k").textContent = num_drafts;
    $("per-step").textContent = (this.#numTokens / (this.#numSteps || 1)).toFixed(1);
    const most = this.maxLen ? ` of ${this.maxLen.toLocaleString("en")}` : "";
    $("context").textContent = `${context_len.toLocaleString("en")}${most}`;
    $("context-bar").style.width = `${(100 * context_len) / (this.maxLen || 1)}%`;
    drawSlots($("slots"), this.#drafted, this.#stood);
  }
}

/** A bar for each slot: the share of its drafts that stood. */
function drawSlots(chart, drafted, stood) {
  const { width, height } = chart.viewBox.baseVal;
  const count = Math.max(8, drafted.length);
  const pitch = width / count;
  const bar = Math.min(pitch - 4, 26);
  const [top, bottom] = [14, height - 16];
  chart.replaceChildren();
  for (let slot = 0; slot < count; slot++) {
    const middle = (slot + 0.5) * pitch;
    const share = drafted[slot] ? stood[slot] / drafted[slot] : 0;
    const high = (bottom - top) * share;
    const box = { x: middle - bar / 2, width: bar, rx: 3 };
    add(chart, "rect", { ...box, class: "track", y: top, height: bottom - top });
    if (drafted[slot]) {
      add(chart, "rect", { ...box, class: "value", y: bottom - high, height: high });
      if (pitch > 20) add(chart, "text", { x: middle, y: top - 4 }, `${Math.round(100 * share)}%`);
    }
    add(chart, "text", { x: middle, y: height - 3 }, slot + 1);
  }
}

function add(parent, name, attributes, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  parent.append(node);
}
