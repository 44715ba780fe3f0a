// The view of a recorded run, in a file that opens without a server. Its data lies in the page, as JSON.

import { Player } from "./player.js";
import { TraceStates } from "./trace_states.js";
import { story } from "./story.js";
import { makeLanes } from "./lanes.js";
import { makeLayers } from "./layers.js";
import { makeLink } from "./link.js";
import { makeMemory } from "./memory.js";
import { makeSlots } from "./slots.js";
import { makeStory } from "./story_panel.js";
import { make } from "./elements.js";
import { partAround } from "./passes.js";
import { counted } from "./words.js";

/**
 * Shows a recorded run.
 * @param {HTMLElement} root
 * @param {{title: string, plan: object, events: import("./groups.js").Event[], omitted_events: number}} trace
 */
export function showTrace(root, trace) {
  const { plan, events } = trace;
  const states = new TraceStates(plan, events);
  const told = makeStory();
  const panels = { layers: makeLayers(), slots: makeSlots(), link: makeLink(), memory: makeMemory() };
  const lanes = makeLanes((time) => player.seek(time));
  const whole = states.moved(states.begin, states.end);
  let shownPass = -1;
  const player = new Player(states, (time) => {
    const now = states.at(time);
    panels.layers.update(now);
    panels.slots.update(now);
    const pass = states.passAt(time);
    lanes.update(events, partAround(states.passes, pass), time);
    if (pass !== shownPass) panels.link.update(passMoved(states, pass), whole, "in this pass");
    shownPass = pass;
  });
  root.classList.add("engine-view");
  root.append(told.element, noteOf(trace), player.element);
  root.append(panels.layers.section, panels.slots.section, lanes.section);
  root.append(make("div", { class: "engine-two" }, panels.link.section, panels.memory.section));
  told.update(story(plan, null));
  for (const panel of [...Object.values(panels), lanes]) panel.setPlan(plan);
  for (const details of root.querySelectorAll("details")) {
    details.addEventListener("toggle", () => player.seek(player.time));
  }
  player.seek(states.begin);
}

function passMoved(states, index) {
  const { begin, end } = states.passes[index];
  return states.moved(begin, end);
}

function noteOf({ omitted_events: omitted }) {
  const text = `Only the last passes are here; ${counted(omitted, "earlier event")} of this run are in trace.json.`;
  return make("p", { class: "engine-note", hidden: omitted === 0, text });
}
