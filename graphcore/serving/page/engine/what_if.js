// What-if: the plan for another memory budget beside the present one, without loading anything.

import { numLayersAt, sumBytes } from "./groups.js";
import { fillRows, make, makeSection, makeTable, setAttribute, setText } from "./elements.js";
import { memoryParts } from "./memory.js";
import { makeStackedBar } from "./stacked_bar.js";
import { asSetting, inBytes, inTime, threeDigits } from "./words.js";

const WAIT = 250; // milliseconds after the last change until the server is asked
const STEPS = 1000; // of the slider
const DECIMAL = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };
const UNITS = { ...DECIMAL, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40 };
const EXPLAINED =
  "Ask how the model would run with another memory budget. This only computes a plan: nothing is loaded, and what " +
  "runs now does not change.";
const HINT = "A size such as 8GB or 6.5GiB.";

/**
 * Returns the bytes of a size as it is written on the command line; null if it is none.
 * @param {string} text
 * @returns {number | null}
 */
export function parseSize(text) {
  const found = /^\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*$/i.exec(text);
  const unit = found === null ? undefined : UNITS[found[2].toLowerCase()];
  return unit === undefined ? null : Math.floor(Number(found[1]) * unit);
}

/**
 * Returns the command line that serves a model with a budget, and with the sizes that the plan is for.
 * @param {{model: string, context_length: number | null, max_sequences: number}} plan
 * @param {string} budget
 * @returns {string}
 */
export function commandLine({ model, context_length: context, max_sequences: sequences }, budget) {
  const quoted = /^[\w./:@+-]+$/.test(model) ? model : `'${model.replaceAll("'", "'\\''")}'`;
  const sizes = `${context ? ` context_length=${context}` : ""} task.max_sequences=${sequences}`;
  return `graphcore serve model=${quoted} streaming=auto streaming.memory_budget=${budget}${sizes}`;
}

/** The panel of what-if. */
export class WhatIf {
  #get;
  #plan = null;
  #number = 0; // of the newest question; answers of earlier ones do not count
  #timer = 0;
  #abort = new AbortController(); // of the newest question
  #field = make("input", { id: "engine-budget", type: "text", autocomplete: "off", spellcheck: "false" });
  #slider = make("input", { type: "range", min: 0, max: STEPS, value: 0, "aria-label": "Memory budget" });
  #hint = make("p", { class: "engine-note", id: "engine-budget-hint", text: HINT });
  #answer = make("div", { class: "engine-answer", hidden: true });
  #error = make("p", { class: "engine-error", role: "alert" });
  #smallest = make("button", { type: "button", class: "engine-button", hidden: true });
  #comparison = makeComparison();
  #command = makeCommand();
  #said = make("p", { class: "visually-hidden", role: "status" });

  /** @param {(path: string, options: {signal: AbortSignal}) => Promise<object>} get */
  constructor(get) {
    this.#get = get;
    const controls = make("div", { class: "engine-controls" });
    controls.append(make("label", { for: "engine-budget", text: "Memory budget" }), this.#field, this.#slider);
    setAttribute(this.#field, "aria-describedby", "engine-budget-hint");
    this.#answer.append(this.#comparison.element, this.#command.element);
    const problem = make("div", { class: "engine-problem" }, this.#error, this.#smallest);
    const note = make("p", { class: "engine-note", text: EXPLAINED });
    this.section = makeSection("panel-what-if", "What if", note, controls, this.#hint, problem);
    this.section.append(this.#answer, this.#said);
    this.#field.addEventListener("input", () => this.#fromField());
    this.#slider.addEventListener("input", () => this.#choose(this.#sliderSetting()));
    this.#smallest.addEventListener("click", () => {
      this.#field.focus();
      this.#choose(this.#smallest.value);
    });
  }

  /** Sets the plan that runs, to compare with. */
  setPlan(plan) {
    const isFirst = this.#plan === null;
    this.#plan = plan;
    if (isFirst) this.#show(asSetting(plan.budget_bytes ?? plan.memory.total_bytes));
  }

  #fromField() {
    const bytes = parseSize(this.#field.value);
    const isSize = bytes !== null && bytes > 0;
    setAttribute(this.#field, "aria-invalid", isSize ? null : "true");
    if (isSize) {
      this.#slider.value = String(this.#position(bytes));
      this.#ask(this.#field.value.trim());
      return;
    }
    this.#cancel();
    const written = this.#field.value.trim();
    this.#fail(written === "" ? "" : `${written} is no size. Write a number with a unit, such as 8GB.`);
  }

  #choose(setting) {
    this.#show(setting);
    this.#ask(setting);
  }

  /** Shows a setting in both controls. */
  #show(setting) {
    this.#field.value = setting;
    setAttribute(this.#field, "aria-invalid", null);
    this.#slider.value = String(this.#position(parseSize(setting)));
    setAttribute(this.#slider, "aria-valuetext", setting);
  }

  /** Returns the least budget and the most: what the machine has, or what all weights need and a quarter more. */
  #range() {
    const { smallest_budget_bytes: least, memory_bytes: machine, memory, groups } = this.#plan;
    const whole = memory.total_bytes - memory.weight_bytes + sumBytes(groups);
    return [least, Math.max(Math.min(machine, 1.25 * whole), least + STEPS)];
  }

  #position(bytes) {
    const [least, most] = this.#range();
    return Math.round((STEPS * (Math.min(most, Math.max(least, bytes)) - least)) / (most - least));
  }

  #sliderSetting() {
    const [least, most] = this.#range();
    const setting = settingBelow(least + ((most - least) * Number(this.#slider.value)) / STEPS);
    return parseSize(setting) < least ? String(least) : setting;
  }

  #cancel() {
    clearTimeout(this.#timer);
    this.#abort.abort();
    this.#number += 1;
    setAttribute(this.#answer, "aria-busy", null);
  }

  #ask(budget) {
    this.#cancel();
    setAttribute(this.#answer, "aria-busy", "true");
    const number = this.#number;
    this.#abort = new AbortController();
    this.#timer = setTimeout(() => this.#fetch(number, budget), WAIT);
  }

  async #fetch(number, budget) {
    let plan = null;
    let problem = "";
    try {
      const { signal } = this.#abort;
      plan = await this.#get(pathOf(budget), { signal });
      await this.#predictPresent(signal);
    } catch (error) {
      problem = error.message;
    }
    if (number !== this.#number) return;
    setAttribute(this.#answer, "aria-busy", null);
    if (plan === null) this.#fail(problem);
    else this.#succeed(plan, budget);
  }

  /** Adds the predicted speed to the plan that runs, by asking for its own budget. */
  async #predictPresent(signal) {
    const present = this.#plan;
    if (present.predicted || present.budget_bytes === null) return;
    present.predicted = (await this.#get(pathOf(present.budget_bytes), { signal })).predicted;
  }

  #fail(problem, smallest = null) {
    this.#answer.hidden = true;
    setText(this.#error, problem);
    this.#smallest.hidden = smallest === null;
    if (smallest === null) return;
    this.#smallest.value = String(smallest);
    setText(this.#smallest, `Use the smallest budget, ${inBytes(smallest)}`);
  }

  #succeed(plan, budget) {
    if (!plan.fits) {
      this.#fail(plan.error ?? `The model does not fit into ${budget}.`, plan.smallest_budget_bytes);
      return;
    }
    this.#fail("");
    this.#answer.hidden = false;
    this.#comparison.update(this.#plan, plan, budget);
    this.#command.update(commandLine(this.#plan, budget));
    setText(this.#said, `With ${budget}: ${layersWords(plan)} stay in memory, ${speedWords(plan)}.`);
  }
}

function pathOf(budget) {
  return `plan?memory_budget=${encodeURIComponent(budget)}`;
}

/** Returns the largest setting of three digits that is not above a size. */
function settingBelow(bytes) {
  const digit = 10 ** Math.max(0, Math.floor(Math.log10(bytes)) - 2);
  return asSetting(Math.floor(bytes / digit) * digit);
}

function makeComparison() {
  const now = { title: make("h3", { text: "Memory now" }), bar: makeStackedBar(false) };
  const then = { title: make("h3"), bar: makeStackedBar(false) };
  const { table, body } = makeTable("The plan that runs and the other one", ["", "Now", "Then"]);
  const head = table.querySelectorAll("thead th");
  const bars = make("div", { class: "engine-two" });
  for (const side of [now, then]) bars.append(make("div", {}, side.title, side.bar.element));
  return {
    element: make("div", {}, table, bars),
    update(present, other, budget) {
      setText(then.title, `Memory with ${budget}`);
      setText(head[2], `With ${budget}`);
      const whole = Math.max(...[present, other].flatMap((plan) => [plan.budget_bytes ?? 0, plan.memory.total_bytes]));
      for (const [side, plan] of [[now, present], [then, other]]) {
        const words = `${inBytes(plan.memory.total_bytes)} planned`;
        side.bar.update(memoryParts(plan), whole, words, plan.budget_bytes ?? undefined);
      }
      fillRows(body, comparedRows(present, other), ["", "Now", `With ${budget}`]);
    },
  };
}

function comparedRows(present, other) {
  const both = (name, words) => [name, words(present), words(other)];
  return [
    both("Layers that stay in memory", layersWords),
    both("Read again for each token", (plan) => inBytes(plan.streaming.expected_bytes_per_token)),
    both("Predicted speed of one request", speedWords),
    both("Tokens that a conversation can have", (plan) => plan.context_length?.toLocaleString("en") ?? "not known"),
    both("Memory: weights that stay", (plan) => inBytes(plan.memory.weight_bytes - plan.memory.slot_bytes)),
    both("Memory: slots", (plan) => inBytes(plan.memory.slot_bytes)),
    both("Memory: KV cache", (plan) => inBytes(plan.memory.kv_bytes)),
    both("Memory in all", (plan) => inBytes(plan.memory.total_bytes)),
  ];
}

function layersWords(plan) {
  return `${plan.num_layers - numLayersAt(plan.groups, "streamed")} of ${plan.num_layers} layers`;
}

function speedWords(plan) {
  const speed = plan.predicted?.tokens_per_second ?? null;
  if (speed === null) return "speed not known";
  return speed >= 1 ? `${threeDigits(speed)} tokens/s` : `${inTime(1 / speed)} for a token`;
}

function makeCommand() {
  const code = make("code");
  const copy = make("button", { type: "button", class: "engine-button", text: "Copy" });
  const said = make("span", { class: "engine-note", role: "status" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      setText(said, "Copied");
    } catch {
      setText(said, "The browser did not allow copying; select the text instead.");
    }
  });
  const label = make("p", { text: "To run it so, start the server with" });
  return {
    element: make("div", { class: "engine-command" }, label, make("pre", { tabindex: "0" }, code), copy, said),
    update(text) {
      setText(code, text);
      setText(said, "");
    },
  };
}
