// The way of the bytes: from where they lie through the slots to what computes.

import { groupColours, numberName, sumBytes } from "./groups.js";
import { fillChildren, make, makeSection, setAttribute, setText } from "./elements.js";
import { counted, inBytes } from "./words.js";

const SLOT_STATES = { free: "free", reading: "being read", ready: "ready", computing: "computing" };
const SLOTS_EXPLAINED =
  "A slot is a piece of memory that is used again and again. Bytes of one group are read into it, the group " +
  "computes, and the slot is free for the next.";

/**
 * Returns the panel of slots; `setPlan` comes before `update`.
 * @returns {{section: HTMLElement, setPlan: (plan: object) => void, update: (streaming: object | null) => void}}
 */
export function makeSlots() {
  const source = makeStation("engine-station");
  const boxes = make("ol", { class: "engine-slots" });
  const target = makeStation("engine-station is-computing");
  const way = make("div", { class: "engine-way" }, source.box, makeArrow(), boxes, makeArrow(), target.box);
  const section = makeSection("panel-slots", "Slots", make("p", { class: "engine-note", text: SLOTS_EXPLAINED }), way);
  let plan = null;
  let colours = new Map();
  return {
    section,
    setPlan(next) {
      plan = next;
      colours = groupColours(plan.groups);
      section.hidden = plan.streaming.slots === 0;
      setText(source.name, plan.streaming.source === "host" ? "RAM" : "Disk");
      const bytes = sumBytes(plan.groups.filter((group) => group.place !== "resident"));
      setText(source.value, bytes > 0 ? inBytes(bytes) : counted(plan.streaming.groups, "group"));
      setText(source.state, "wait there");
      setText(target.name, "Computing");
      setText(target.state, "");
    },
    update(streaming) {
      if (section.hidden) return;
      const slots = streaming?.slots ?? [];
      fillChildren(boxes, slots, makeSlot, (box, slot) => showSlot(box, slot, plan, colours));
      setText(target.value, computingWords(streaming, plan.groups));
    },
  };
}

function makeStation(kind) {
  const name = make("span", { class: "engine-station-name" });
  const value = make("strong");
  const state = make("span", { class: "engine-station-state" });
  return { name, value, state, box: make("div", { class: kind }, name, value, state) };
}

function computingWords(streaming, groups) {
  const group = streaming?.computing_group ?? null;
  if (group !== null) return numberName(groups, group);
  return streaming?.slots.some((slot) => slot.state === "reading") ? "waiting for bytes" : "nothing now";
}

function makeArrow() {
  return make("span", { class: "engine-arrow", "aria-hidden": "true" });
}

function makeSlot() {
  const { box } = makeStation("");
  return make("li", { class: "engine-slot at-streamed" }, make("i", { class: "engine-part" }), ...box.children);
}

function showSlot(box, { slot, group, state }, plan, colours) {
  const [bar, name, value, words] = box.children;
  setAttribute(box, "data-state", state);
  setAttribute(bar, "data-state", state === "free" ? null : state);
  bar.style.setProperty("--colour", colours.has(group) ? `var(--group-${colours.get(group)})` : "var(--kind-5)");
  setText(name, `Slot ${slot}`);
  setText(value, group === null || state === "free" ? "empty" : numberName(plan.groups, group));
  setText(words, SLOT_STATES[state] ?? state);
}
