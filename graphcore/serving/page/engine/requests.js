// The requests: numbers with their last minute, and a table of those that run or wait.

import { fillRows, make, makeSection, makeTable, setAttribute, setText } from "./elements.js";
import { counted, inPercent, inTime, threeDigits } from "./words.js";

const COLUMNS = ["Request", "State", "Prompt", "Answer", "Tokens/s", "Waited"];
const STATES = { waiting: "waiting", prefill: "reading the prompt", decode: "answering", swapped: "set aside" };
const MOST_ROWS = 50;
const RATE_SECONDS = 3; // interval of the rates
const LINE = { width: 120, height: 28 };

/**
 * Returns the panel of requests.
 * @returns {{section: HTMLElement, update: (status: object, history: import("./history.js").History) => void}}
 */
export function makeRequests() {
  const running = makeTile("Running");
  const waiting = makeTile("Waiting");
  const prompts = makeTile("Prompt tokens/s", true);
  const answers = makeTile("Answer tokens/s", true);
  const first = makeTile("Time to first token");
  const drafts = makeTile("Drafts accepted");
  const boxes = [running, waiting, prompts, answers, first, drafts].map((tile) => tile.box);
  const tiles = make("dl", { class: "engine-tiles" }, ...boxes);
  const { table, body } = makeTable("Requests that run or wait", COLUMNS);
  table.classList.add("is-cards");
  const note = make("p", { class: "engine-note" });
  const section = makeSection("panel-requests", "Requests", tiles, table, note);
  return {
    section,
    update(status, history) {
      const numWaiting = status.requests.filter((one) => one.state === "waiting" || one.state === "swapped").length;
      setText(running.value, String(status.requests.length - numWaiting));
      setText(waiting.value, String(numWaiting));
      showRate(prompts, history, (sample) => sample.totals.prompt_tokens);
      showRate(answers, history, (sample) => sample.totals.new_tokens);
      showFirst(first, status.first_token_seconds);
      showDrafts(drafts, status.speculation);
      table.hidden = status.requests.length === 0;
      fillRows(body, status.requests.slice(0, MOST_ROWS).map(rowOf), COLUMNS);
      setText(note, noteOf(status));
    },
  };
}

function makeTile(name, hasLine = false) {
  const value = make("span", { class: "engine-figure" });
  const extra = make("span", { class: "engine-note" });
  const box = make("div", { class: "engine-tile" }, make("dt", { text: name }), make("dd", {}, value, extra));
  const tile = { value, extra, box };
  if (!hasLine) return tile;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  setAttribute(svg, "viewBox", `0 0 ${LINE.width} ${LINE.height}`);
  setAttribute(svg, "preserveAspectRatio", "none");
  setAttribute(svg, "class", "engine-line");
  setAttribute(svg, "aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.append(line);
  tile.box.lastElementChild.append(svg);
  return { ...tile, line };
}

function showRate(tile, history, total) {
  const rate = history.rate(total, RATE_SECONDS);
  setText(tile.value, rate === null ? "–" : threeDigits(rate));
  const values = history.line(total, RATE_SECONDS);
  const most = Math.max(...values, 1);
  const step = LINE.width / Math.max(1, values.length - 1);
  const heightOf = (value) => LINE.height - 1 - (value / most) * (LINE.height - 2);
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${heightOf(value).toFixed(1)}`);
  setAttribute(tile.line, "points", points.join(" "));
  const highest = Math.max(0, ...values);
  setText(tile.extra, highest > 0 ? `most in the last minute: ${threeDigits(highest)}` : "");
}

function showFirst(tile, seconds) {
  setText(tile.value, seconds === null ? "–" : inTime(seconds.median));
  if (seconds === null) setText(tile.extra, "no answers yet");
  else setText(tile.extra, `median; 95% within ${inTime(seconds.p95)}, of the last ${lastWords(seconds.count)}`);
}

function lastWords(count) {
  return count === 1 ? "answer" : counted(count, "answer");
}

function showDrafts(tile, speculation) {
  tile.box.hidden = !speculation;
  if (!speculation) return;
  const { draft_tokens: drafted, accepted_tokens: accepted } = speculation;
  setText(tile.value, drafted > 0 ? inPercent(accepted / drafted) : "–");
  const each = [eachTakes("draft step", speculation.draft_seconds, speculation.draft_steps)];
  each.push(eachTakes("check", speculation.check_seconds, speculation.check_steps));
  const texts = [`${accepted.toLocaleString("en")} of ${counted(drafted, "draft token")}`, ...each];
  setText(tile.extra, texts.filter((text) => text !== "").join("; "));
}

function eachTakes(name, seconds, count) {
  return count > 0 ? `a ${name} takes ${inTime(seconds / count)}` : "";
}

function rowOf(one) {
  const done = Math.min(one.computed_tokens, one.prompt_tokens);
  const cached = one.cached_tokens > 0 ? `, ${one.cached_tokens.toLocaleString("en")} from the cache` : "";
  const part = done < one.prompt_tokens ? `${done.toLocaleString("en")} of ` : "";
  const prompt = part + counted(one.prompt_tokens, "token");
  return [
    one.id,
    STATES[one.state] ?? one.state,
    prompt + cached,
    `${one.new_tokens.toLocaleString("en")} of at most ${one.max_new_tokens.toLocaleString("en")}`,
    one.decode_seconds > 0 ? threeDigits(one.new_tokens / one.decode_seconds) : "–",
    inTime(one.waiting_seconds),
  ];
}

function noteOf(status) {
  const { requests, totals } = status;
  const cached = `${totals.cached_tokens.toLocaleString("en")} from the prefix cache`;
  const prompts = `${counted(totals.prompt_tokens, "prompt token")} (and ${cached})`;
  const answers = counted(totals.new_tokens, "answer token");
  const since = `Since the start: ${counted(totals.requests, "request")}, ${prompts}, ${answers}.`;
  const more = requests.length > MOST_ROWS ? `${counted(requests.length - MOST_ROWS, "more request")} not shown. ` : "";
  return (requests.length === 0 ? "No request runs now. " : more) + since;
}
