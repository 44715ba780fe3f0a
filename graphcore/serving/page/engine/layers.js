// The layers as cells: filled while their bytes are in memory, and marked while they are read or computed with.

import { PLACES, groupColours, groupLabel, groupName, layersOf, sumBytes } from "./groups.js";
import { fillChildren, fillRows, make, makeSection, makeTable, setAttribute, setText } from "./elements.js";
import { counted, inBytes } from "./words.js";

const LAYER_COLUMNS = ["Group", "Size", "Where it is", "Now"];
const MANY_CELLS = 48; // groups from which on cells are narrow
const LAYER_STATES = { reading: "being read", ready: "ready in a slot", computing: "computing" };
const LAYER_LEGEND = [
  ["resident", "stays in memory"],
  ["streamed", "on the disk; only passes through a slot"],
  ["reading", "being read into a slot"],
  ["ready", "ready in a slot"],
  ["computing", "computing now"],
  ["gathered", "only needed rows are fetched"],
  ["cached", "experts, in memory in part"],
  ["mapped", "experts, read in RAM"],
];

/**
 * Returns the state of each number that is in a slot or computes.
 * @param {object | null} streaming `streaming` of /status
 * @returns {Map<number, string>}
 */
export function numberStates(streaming) {
  const states = new Map();
  for (const { group, state } of streaming?.slots ?? []) {
    if (group !== null && state in LAYER_STATES) states.set(group, state);
  }
  for (const group of streaming?.reading ?? []) if (!states.has(group)) states.set(group, "reading");
  if (Number.isInteger(streaming?.computing_group)) states.set(streaming.computing_group, "computing");
  return states;
}

/**
 * Returns the panel of layers; `setPlan` comes before `update`.
 * @returns {{section: HTMLElement, setPlan: (plan: object) => void, update: (streaming: object | null) => void}}
 */
export function makeLayers() {
  const cells = make("div", { class: "engine-cells", role: "img" });
  const legend = make("ul", { class: "engine-legend" });
  const { table, body } = makeTable("Groups of weights and where they are", LAYER_COLUMNS);
  const details = make("details", {}, make("summary", { text: "All groups as a table" }), table);
  const section = makeSection("panel-layers", "Layers", cells, legend, details);
  let plan = null;
  return {
    section,
    setPlan(next) {
      plan = next;
      showCells(cells, plan);
      showLegend(legend, plan);
      setAttribute(cells, "aria-label", layerSummary(plan));
    },
    update(streaming) {
      const states = numberStates(streaming);
      plan.groups.forEach((group, index) => markCell(cells.children[index], group, states));
      if (details.open) fillRows(body, plan.groups.map((group) => layerRow(group, states)), LAYER_COLUMNS);
    },
  };
}

function showCells(cells, plan) {
  const colours = groupColours(plan.groups);
  const share = cachedShare(plan);
  cells.classList.toggle("is-narrow", plan.groups.length > MANY_CELLS);
  fillChildren(cells, plan.groups, () => make("div"), (cell, group) => {
    cell.className = `engine-cell at-${group.place}${layersOf(group) === null ? " is-wide" : ""}`;
    cell.title = `${groupName(group)}: ${sizeWords(group)}, ${PLACES[group.place] ?? group.place}`;
    const numbers = group.numbers.length === 0 ? [null] : group.numbers;
    const parts = numbers.map((number) => {
      const part = make("i", { class: "engine-part" });
      if (colours.has(number)) part.style.setProperty("--colour", `var(--group-${colours.get(number)})`);
      if (group.place === "cached") part.style.setProperty("--held", `${100 * share}%`);
      return part;
    });
    cell.replaceChildren(...parts, make("span", { text: groupLabel(group) }));
  });
}

function sizeWords(group) {
  return group.bytes === 0 ? "the bytes of the embedding" : inBytes(group.bytes);
}

function cachedShare(plan) {
  const cached = sumBytes(plan.groups.filter((group) => group.place === "cached"));
  const resident = plan.groups.filter((group) => group.place === "resident" && group.name.startsWith("experts"));
  const held = plan.memory.expert_bytes - sumBytes(resident);
  return cached === 0 ? 0 : Math.min(1, Math.max(0, held / cached));
}

function showLegend(legend, plan) {
  const places = new Set(plan.groups.map((group) => group.place));
  const isShown = (kind) => places.has(kind in LAYER_STATES ? "streamed" : kind) || kind === "computing";
  const shown = LAYER_LEGEND.filter(([kind]) => isShown(kind));
  const from = plan.streaming?.source === "host" ? "in RAM" : "on the disk";
  fillChildren(legend, shown, () => make("li"), (item, [kind, text]) => {
    const kinds = `engine-cell at-${kind in LAYER_STATES ? "streamed" : kind} is-${kind}`;
    const swatch = make("span", { class: kinds }, make("i", { class: "engine-part" }));
    item.replaceChildren(swatch, text.replace("on the disk", from));
  });
}

function layerSummary(plan) {
  const parts = Object.entries(PLACES)
    .map(([place, words]) => [plan.groups.filter((group) => group.place === place).length, words])
    .filter(([count]) => count > 0)
    .map(([count, words]) => `${count}: ${words}`);
  return `${counted(plan.groups.length, "group")} of weights: ${parts.join("; ")}. The table below names each.`;
}

function markCell(cell, group, states) {
  let isComputing = false;
  group.numbers.forEach((number, index) => {
    const state = states.get(number) ?? "";
    if (state === "computing") isComputing = true;
    setAttribute(cell.children[index], "data-state", state || null);
  });
  setAttribute(cell, "data-state", isComputing ? "computing" : null);
}

function layerRow(group, states) {
  const found = [...new Set(group.numbers.map((number) => states.get(number)).filter(Boolean))];
  const now = found.map((state) => LAYER_STATES[state]).join(", ");
  return [groupName(group), sizeWords(group), PLACES[group.place] ?? group.place, now];
}
