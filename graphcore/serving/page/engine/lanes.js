// The timeline: a lane for computing, one for a draft model, one for waiting, and one for each worker that moves bytes;
// a bar for each event.

import { groupColours, groupLabel, numberName } from "./groups.js";
import { fillRows, make, makeSection, makeTable, setAttribute, setText } from "./elements.js";
import { inBytes, inTime } from "./words.js";

const LANE_ORDER = ["compute", "draft", "stall", "copy", "read"];
const LANE_NAMES = { compute: "compute", draft: "draft", stall: "waiting", copy: "copy", read: "read" };
const NARROW = 560; // pixels from which on the lanes' names lie beside the bars
const LANE_SIZES = { bar: 20, gap: 6, name: 15, beside: 76, axis: 22 };
const HALO = 4; // pixels, of the line around a label
const LETTER = 6.6; // pixels, approximately
const LANES_EMPTY = "Nothing has moved yet: send a message, and its passes are drawn here.";
const LANE_COLUMNS = ["Lane", "Busy", "Bytes", "Events"];
const LANE_LEGEND = [
  ["var(--group-0)", "a group that is read, with the numbers of its layers"],
  ["var(--resident)", "a group that stays in memory"],
  ["var(--stall)", "waiting for bytes"],
];

/** @typedef {import("./groups.js").Event} Event */

/**
 * Returns the lanes that have events, from top to bottom, with their events. The lane of waiting is always there.
 * @param {Event[]} events
 * @returns {{name: string, lane: string, events: Event[]}[]}
 */
export function lanesOf(events) {
  const found = new Map([["stall 0", { lane: "stall", worker: 0, events: [] }]]);
  for (const event of events) {
    const key = `${event[0]} ${event[5]}`;
    if (!found.has(key)) found.set(key, { lane: event[0], worker: event[5], events: [] });
    found.get(key).events.push(event);
  }
  const rank = (lane) => LANE_ORDER.indexOf(lane.lane);
  const lanes = [...found.values()].sort((a, b) => rank(a) - rank(b) || a.worker - b.worker);
  const isAlone = (lane) => lanes.filter((other) => other.lane === lane.lane).length === 1;
  return lanes.map((lane) => ({ ...lane, name: LANE_NAMES[lane.lane] + (isAlone(lane) ? "" : ` ${lane.worker}`) }));
}

/**
 * Returns the panel of the timeline.
 * @param {(time: number) => void} [onTime] called with the time of a place that was clicked
 * @returns {{section: HTMLElement, setPlan: (plan: object) => void,
 *     update: (events: Event[], part: object | null, cursor?: number) => void}}
 *     part: the time to draw, `{begin, end, borders}`; null without events
 */
export function makeLanes(onTime) {
  const canvas = make("canvas", { class: "engine-lanes", role: "img" });
  const caption = make("p", { class: "engine-note" });
  const { table, body } = makeTable("Sums of each lane in the part that is drawn", LANE_COLUMNS);
  const details = make("details", {}, make("summary", { text: "The lanes as a table" }), table);
  const section = makeSection("panel-timeline", "Timeline", caption, canvas, makeColourLegend(), details);
  const drawing = new LaneDrawing(canvas);
  if (onTime !== undefined) canvas.addEventListener("pointerdown", (press) => onTime(drawing.timeAt(press.offsetX)));
  let groups = [];
  return {
    section,
    setPlan(plan) {
      groups = plan.groups;
      section.hidden = !plan.is_streaming;
      drawing.colours = groupColours(groups);
      drawing.labels = new Map(groups.flatMap((group) => group.numbers.map((number) => [number, groupLabel(group)])));
    },
    update(events, part, cursor) {
      const isEmpty = events.length === 0;
      canvas.hidden = details.hidden = isEmpty;
      setText(caption, isEmpty ? LANES_EMPTY : captionOf(part));
      if (isEmpty) return;
      const shown = events.filter((event) => event[3] > part.begin && event[2] < part.end);
      const lanes = lanesOf(shown);
      drawing.draw(lanes, part, cursor);
      setAttribute(canvas, "aria-label", `${captionOf(part)} ${waitedIn(lanes, groups)}`);
      if (details.open) fillRows(body, lanes.map((lane) => laneRow(lane)), LANE_COLUMNS);
    },
  };
}

function makeColourLegend() {
  const items = LANE_LEGEND.map(([colour, text]) => {
    const swatch = make("i", { class: "engine-swatch" });
    swatch.style.background = colour;
    return make("li", {}, swatch, text);
  });
  const border = make("li", {}, make("i", { class: "engine-border" }), "the next pass begins");
  return make("ul", { class: "engine-legend" }, ...items, border);
}

function captionOf(part) {
  return `These ${inTime(part.end - part.begin)}: what computed, what waited for bytes, and what was copied.`;
}

function waitedIn(lanes, groups) {
  const stalls = lanes.find((lane) => lane.lane === "stall").events;
  if (stalls.length === 0) return "Nothing waited.";
  const longest = stalls.reduce((most, event) => (event[3] - event[2] > most[3] - most[2] ? event : most));
  return `Longest wait: ${inTime(longest[3] - longest[2])} for ${numberName(groups, longest[1])}.`;
}

function laneRow(lane) {
  const busy = lane.events.reduce((sum, event) => sum + event[3] - event[2], 0);
  const bytes = lane.events.reduce((sum, event) => sum + event[4], 0);
  return [lane.name, inTime(busy), bytes === 0 ? "" : inBytes(bytes), String(lane.events.length)];
}

/** A canvas with lanes. It is drawn again if its width or the colour scheme changes. */
class LaneDrawing {
  colours = new Map();
  labels = new Map();
  #canvas;
  #context;
  #last = null;
  #styles = null;
  #across = 0; // width of the canvas, in pixels
  #left = 0;
  #width = 0; // of the bars, in pixels

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    new ResizeObserver(([entry]) => {
      if (this.#across === entry.contentRect.width) return;
      this.#across = entry.contentRect.width;
      requestAnimationFrame(() => this.#again()); // not here, where a change of the height would be an error
    }).observe(canvas);
    const recolour = () => {
      this.#styles = null;
      this.#again();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
    document.addEventListener("theme", recolour);
  }

  /** Draws lanes in a part of the time, with a line at the cursor's time if there is one. */
  draw(lanes, part, cursor) {
    this.#last = [lanes, part, cursor];
    const width = this.#across;
    if (width === 0) return;
    const isWide = width >= NARROW;
    const step = LANE_SIZES.bar + LANE_SIZES.gap + (isWide ? 0 : LANE_SIZES.name);
    this.#left = isWide ? LANE_SIZES.beside : 0;
    this.#width = width - this.#left;
    this.#clear(width, lanes.length * step + LANE_SIZES.axis);
    const bottom = lanes.length * step;
    const styles = this.#styles;
    this.#drawAxis(part, bottom);
    lanes.forEach((lane, index) => {
      const top = index * step + (isWide ? 0 : LANE_SIZES.name);
      this.#text(lane.name, 0, isWide ? top + LANE_SIZES.bar / 2 : top - LANE_SIZES.name / 2 + 1, styles.muted, "left");
      this.#drawBars(lane, top, part);
    });
    for (const border of part.borders.slice(1)) this.#line(this.#x(border, part), bottom, styles.text, 1);
    if (cursor !== undefined) this.#line(this.#x(cursor, part), bottom, styles.accent, 2);
  }

  /** Returns the time at a place of the canvas, in pixels from its left. */
  timeAt(x) {
    const { begin, end } = this.#last[1];
    return begin + Math.min(1, Math.max(0, (x - this.#left) / this.#width)) * (end - begin);
  }

  #again() {
    if (this.#last !== null) this.draw(...this.#last);
  }

  #clear(width, height) {
    const scale = devicePixelRatio;
    const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.#canvas.width !== across || this.#canvas.height !== down) {
      this.#canvas.width = across;
      this.#canvas.height = down;
      this.#canvas.style.height = `${height}px`;
    }
    this.#styles ??= stylesOf(this.#canvas);
    this.#context.setTransform(scale, 0, 0, scale, 0, 0);
    this.#context.clearRect(0, 0, width, height);
    this.#context.font = `11px ${this.#styles.font}`;
    this.#context.textBaseline = "middle";
  }

  #x(time, { begin, end }) {
    return this.#left + ((time - begin) / Math.max(end - begin, 1e-9)) * this.#width;
  }

  #drawBars(lane, top, part) {
    const context = this.#context;
    let before = null; // group, left and right of the bars that are adjacent, for one label
    for (const event of [...lane.events].sort((a, b) => a[2] - b[2])) {
      const left = this.#x(Math.max(event[2], part.begin), part);
      const right = Math.max(left + 0.75, this.#x(Math.min(event[3], part.end), part));
      context.fillStyle = this.#fill(lane.lane, event[1]);
      context.fillRect(left, top, right - left, LANE_SIZES.bar);
      if (before !== null && before.group === event[1]) before.right = right; // also across a gap
      else {
        this.#label(before, lane.lane, top);
        before = { group: event[1], left, right };
      }
    }
    this.#label(before, lane.lane, top);
  }

  #fill(lane, group) {
    if (lane === "stall") return this.#styles.stall;
    if (lane === "draft") return this.#styles.resident;
    return this.colours.has(group) ? this.#styles.groups[this.colours.get(group)] : this.#styles.resident;
  }

  #label(bars, lane, top) {
    if (bars === null || lane === "draft") return; // a draft model has no groups
    const text = this.labels.get(bars.group) ?? String(bars.group);
    if (text.length * LETTER + 4 > bars.right - bars.left) return;
    const { stallInk, groupInk, residentInk } = this.#styles;
    const ink = lane === "stall" ? stallInk : this.colours.has(bars.group) ? groupInk : residentInk;
    const halo = this.#fill(lane, bars.group); // a letter between two bars is read like one on a bar
    this.#text(text, (bars.left + bars.right) / 2, top + LANE_SIZES.bar / 2 + 0.5, ink, "center", halo);
  }

  #text(text, x, y, colour, align, halo = null) {
    const context = this.#context;
    context.textAlign = align;
    if (halo !== null) {
      Object.assign(context, { strokeStyle: halo, lineWidth: HALO, lineJoin: "round" });
      context.strokeText(text, x, y);
    }
    context.fillStyle = colour;
    context.fillText(text, x, y);
  }

  #line(x, bottom, colour, width) {
    this.#context.fillStyle = colour;
    this.#context.fillRect(x - width / 2, 0, width, bottom);
  }

  #drawAxis(part, bottom) {
    const seconds = part.end - part.begin;
    const step = niceStep(seconds / Math.max(2, this.#width / 90));
    for (let at = 0; at <= seconds; at += step) {
      const x = this.#x(part.begin + at, part);
      this.#context.fillStyle = this.#styles.border;
      this.#context.fillRect(x, 0, 1, bottom);
      const align = at === 0 ? "left" : x > this.#left + this.#width - 24 ? "right" : "center";
      this.#text(inTime(at), x, bottom + LANE_SIZES.axis / 2, this.#styles.muted, align);
    }
  }
}

/** Returns the least of 1, 2, 5, 10, 20, ... times a power of ten that is not below a value. */
function niceStep(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].find((digit) => digit * power >= value) * power;
}

function stylesOf(canvas) {
  const style = getComputedStyle(canvas);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    font: style.fontFamily,
    text: of("--text"),
    muted: of("--muted"),
    border: of("--border"),
    accent: of("--accent"),
    stall: of("--stall"),
    stallInk: of("--stall-ink"),
    resident: of("--resident"),
    residentInk: of("--resident-ink"),
    groupInk: of("--group-ink"),
    groups: Array.from({ length: 8 }, (_, index) => of(`--group-${index}`)),
  };
}
