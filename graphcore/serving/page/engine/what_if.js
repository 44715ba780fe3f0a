// What-if: the plan for another memory budget, context and number of sequences beside the present one, without loading
// anything.

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
  "Ask how the model would run with other sizes. This only computes a plan: nothing is loaded, and what runs now does " +
  "not change.";
const HINT = "The budget is a size such as 6.5GiB; the context is in tokens.";
const SIZES = [
  ["context_length", "Context length"],
  ["max_sequences", "Requests at once"],
];

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
 * @param {{model: string, context_length: number | null, max_sequences: number}} sizes
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
  #offer = make("button", { type: "button", class: "engine-button", hidden: true }); // a budget that works
  #sizes = SIZES.map(([key, label]) => {
    const names = { id: `engine-${key}`, type: "text", inputmode: "numeric", autocomplete: "off" };
    return { key, label, field: make("input", { ...names, "aria-describedby": "engine-budget-hint" }) };
  });
  #comparison = makeComparison();
  #command = makeCommand();
  #said = make("p", { class: "visually-hidden", role: "status" });

  /** @param {(path: string, options: {signal: AbortSignal}) => Promise<object>} get */
  constructor(get) {
    this.#get = get;
    const controls = make("div", { class: "engine-controls" });
    controls.append(make("label", { for: "engine-budget", text: "Memory budget" }), this.#field, this.#slider);
    for (const { label, field } of this.#sizes) {
      controls.append(make("label", { for: field.id, text: label }), field);
      field.addEventListener("input", () => this.#read());
    }
    setAttribute(this.#field, "aria-describedby", "engine-budget-hint");
    this.#answer.append(this.#comparison.element, this.#command.element);
    const problem = make("div", { class: "engine-problem" }, this.#error, this.#offer);
    const note = make("p", { class: "engine-note", text: EXPLAINED });
    this.section = makeSection("panel-what-if", "What if", note, controls, this.#hint, problem);
    this.section.append(this.#answer, this.#said);
    this.#field.addEventListener("input", () => this.#read());
    this.#slider.addEventListener("input", () => this.#choose(this.#sliderSetting()));
    this.#offer.addEventListener("click", () => {
      this.#field.focus();
      this.#choose(this.#offer.value);
    });
  }

  /** Sets the plan that runs, to compare with. */
  setPlan(plan) {
    const isFirst = this.#plan === null;
    this.#plan = plan;
    if (!isFirst) return;
    this.#show(asSetting(plan.budget_bytes ?? plan.memory.total_bytes));
    for (const { key, field } of this.#sizes) field.value = String(plan[key] ?? "");
  }

  /** Reads the fields, and asks for the plan unless one of them is wrong. */
  #read() {
    const budget = this.#field.value.trim();
    const bytes = parseSize(budget);
    const isSize = bytes !== null && bytes > 0;
    setAttribute(this.#field, "aria-invalid", isSize ? null : "true");
    if (isSize) this.#slider.value = String(this.#position(bytes));
    const wrong = this.#sizes.filter(({ field }) => {
      const isNumber = /^\s*[1-9]\d{0,8}\s*$/.test(field.value);
      setAttribute(field, "aria-invalid", isNumber ? null : "true");
      return !isNumber;
    });
    if (isSize && wrong.length === 0) {
      this.#ask(budget);
      return;
    }
    this.#cancel();
    const [name, text, advice] = isSize
      ? [wrong[0].field.value.trim(), "is no number of 1 or more.", `${wrong[0].label} is a whole number.`]
      : [budget, "is no size.", "Write a number with a unit, such as 8GiB."];
    this.#fail(name === "" ? "" : `${name} ${text} ${advice}`);
  }

  /** Returns the sizes that are asked for: those that differ from the plan that runs. */
  #askedSizes() {
    const asked = this.#sizes.map(({ key, field }) => [key, Number(field.value)]);
    return Object.fromEntries(asked.filter(([key, value]) => value !== this.#plan[key]));
  }

  #choose(setting) {
    this.#show(setting);
    this.#read();
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
    const setting = asSetting(least + ((most - least) * Number(this.#slider.value)) / STEPS);
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
    const [number, sizes] = [this.#number, this.#askedSizes()];
    this.#abort = new AbortController();
    this.#timer = setTimeout(() => this.#fetch(number, budget, sizes), WAIT);
  }

  async #fetch(number, budget, sizes) {
    let plan = null;
    let problem = "";
    try {
      const { signal } = this.#abort;
      plan = await this.#get(pathOf(budget, sizes), { signal });
      await this.#predictPresent(signal);
    } catch (error) {
      problem = error.message;
    }
    if (number !== this.#number) return;
    setAttribute(this.#answer, "aria-busy", null);
    if (plan === null) this.#fail(problem);
    else this.#succeed(plan, budget, sizes);
  }

  /** Adds the predicted speed to the plan that runs, by asking for its own budget. */
  async #predictPresent(signal) {
    const present = this.#plan;
    if (present.predicted || present.budget_bytes === null) return;
    present.predicted = (await this.#get(pathOf(present.budget_bytes, {}), { signal })).predicted;
  }

  #fail(problem, offer = null) {
    this.#answer.hidden = true;
    setText(this.#error, problem);
    this.#offer.hidden = offer === null;
    if (offer === null) return;
    this.#offer.value = offer.setting;
    setText(this.#offer, offer.words);
  }

  #succeed(plan, budget, sizes) {
    if (!plan.fits) {
      this.#fail(plan.error ?? `The model does not fit into ${budget}.`, offerOf(plan, parseSize(budget)));
      return;
    }
    this.#fail("");
    this.#answer.hidden = false;
    this.#comparison.update(this.#plan, plan, budget);
    this.#command.update(commandLine({ ...this.#plan, ...sizes }, budget));
    setText(this.#said, `With ${budget}: ${layersWords(plan)} stay in memory, ${speedWords(plan)}.`);
  }
}

function pathOf(budget, sizes) {
  return `plan?${new URLSearchParams({ memory_budget: budget, ...sizes })}`;
}

/** Returns a budget that works instead of one that does not: the largest, the smallest, or null if none does. */
function offerOf({ smallest_budget_bytes: least, memory_bytes: most }, asked) {
  if (least > most) return null;
  if (asked <= most) return { setting: String(least), words: `Use the smallest budget, ${inBytes(least)}` };
  const setting = parseSize(asSetting(most)) < least ? String(least) : asSetting(most);
  return { setting, words: `Use the largest budget, ${inBytes(parseSize(setting))}` };
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
    both("Requests at once", (plan) => plan.max_sequences.toLocaleString("en")),
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
