// The ranks of a ring: what each of them has, and the time of its part of a pass.

import { fillRows, make, makeSection, makeTable, setText } from "./elements.js";
import { counted, inBytes, inPercent, inRate, inTime } from "./words.js";

const COLUMNS = ["Rank", "Layers", "In memory", "Read for a pass", "Its part of a pass", "At"];
const EXPLAINED =
  "Several processes share the layers of this model. Each reads and computes its own layers, and hands the result to " +
  "the next one.";

/**
 * Returns the panel of ranks.
 * @returns {{section: HTMLElement, update: (ring?: object | null) => void}}
 */
export function makeRanks() {
  const { table, body } = makeTable("Ranks", COLUMNS);
  table.classList.add("is-cards");
  const note = make("p", { class: "engine-note" });
  const section = makeSection("panel-ranks", "Ranks", make("p", { class: "engine-note", text: EXPLAINED }), table, note);
  return {
    section,
    update(ring) {
      section.hidden = !ring;
      if (!ring) return;
      fillRows(body, ring.ranks.map(rowOf), COLUMNS);
      setText(note, noteOf(ring));
    },
  };
}

function rowOf(one) {
  const { streamed_bytes: streamed, part_seconds: seconds } = one;
  return [
    String(one.rank),
    String(one.layers),
    inBytes(one.weight_bytes),
    streamed > 0 ? inBytes(streamed) : "nothing",
    seconds === null ? "–" : inTime(seconds),
    seconds > 0 && streamed > 0 ? inRate(streamed / seconds) : "–",
  ];
}

function noteOf(ring) {
  if (ring.pass_seconds === null) return `${counted(ring.ranks.length, "rank")}; no pass has run yet.`;
  return `A pass takes ${inTime(ring.pass_seconds)}, ${inPercent(ring.hand_over_share)} of it between ranks.`;
}
