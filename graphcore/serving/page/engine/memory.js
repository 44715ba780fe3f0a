// The memory budget: one bar with what is in it.

import { make, makeSection, setText } from "./elements.js";
import { makeStackedBar } from "./stacked_bar.js";
import { inBytes } from "./words.js";

const MEMORY_PARTS = [
  ["resident_bytes", "Resident weights", "layers that stay in memory"],
  ["slot_bytes", "Slots", "room through which the other layers pass"],
  ["expert_bytes", "Experts", "experts that are in memory"],
  ["vector_bytes", "Norms and biases", "small weights that always stay"],
  ["kv_bytes", "KV cache", "what the model keeps of every conversation's tokens"],
  ["workspace_bytes", "Workspace", "values of the pass that is being computed"],
  ["program_bytes", "Programs", "recorded steps of decoding"],
  ["buffer_bytes", "Read buffers", "bytes on their way from the disk to a slot"],
  ["overhead_bytes", "CUDA", "libraries and graphs of the GPU, an estimate"],
];

/**
 * Returns what a plan's memory is used for, without what needs none; with a budget also what is left of it.
 * @param {object} plan
 * @returns {import("./stacked_bar.js").BarPart[]}
 */
export function memoryParts(plan) {
  const parts = MEMORY_PARTS.map(([key, name, note]) => {
    return { kind: `part-${key.replace("_bytes", "")}`, name, note, amount: plan.memory[key] };
  });
  const unused = plan.budget_bytes === null ? 0 : plan.budget_bytes - plan.memory.total_bytes;
  if (unused > 0) parts.push({ kind: "part-unused", name: "Unused", note: "left of the budget", amount: unused });
  return parts.filter((part) => part.amount > 0).map((part) => ({ ...part, words: inBytes(part.amount) }));
}

/**
 * Returns the panel of the memory budget.
 * @returns {{section: HTMLElement, setPlan: (plan: object) => void}}
 */
export function makeMemory() {
  const summary = make("p", { class: "engine-note" });
  const bar = makeStackedBar();
  const section = makeSection("panel-memory", "Memory", summary, bar.element);
  return {
    section,
    setPlan(plan) {
      const total = plan.memory.total_bytes;
      const words = budgetWords(plan);
      setText(summary, words);
      bar.update(memoryParts(plan), Math.max(total, plan.budget_bytes ?? 0), words, plan.budget_bytes ?? undefined);
    },
  };
}

function budgetWords(plan) {
  const { total_bytes: total, load_peak_bytes: peak } = plan.memory;
  const where = plan.device.startsWith("cuda") ? "the GPU's memory" : "memory";
  const budget = plan.budget_bytes;
  const used =
    budget === null ? `${inBytes(total)} of ${where} are planned; there is no budget.`
    : `${inBytes(total)} of a budget of ${inBytes(budget)} in ${where}.`;
  return peak > total ? `${used} Loading takes up to ${inBytes(peak)}.` : used;
}
