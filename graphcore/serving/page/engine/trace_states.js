// What a list of events says about any moment: the state of slots and groups, and what had moved by then.

import { passesOf } from "./passes.js";
import { streamedNumbers } from "./groups.js";

/** @typedef {import("./groups.js").Event} Event */
/**
 * @typedef {{readBegin: number, readEnd: number, computeBegin: number, computeEnd: number}} Use
 *     a group's way through its slot
 */

/**
 * Returns the union of intervals: sorted, disjoint and not empty.
 * @param {[number, number][]} intervals
 * @returns {[number, number][]}
 */
export function union(intervals) {
  const merged = [];
  for (const [begin, end] of [...intervals].sort((a, b) => a[0] - b[0])) {
    const last = merged.at(-1);
    if (end <= begin) continue;
    if (last !== undefined && begin <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([begin, end]);
  }
  return merged;
}

/**
 * Returns the time for which two unions overlap.
 * @param {[number, number][]} these
 * @param {[number, number][]} others
 * @returns {number}
 */
export function overlap(these, others) {
  let sum = 0;
  let at = 0;
  for (const [begin, end] of these) {
    while (at < others.length && others[at][1] <= begin) at += 1;
    for (let index = at; index < others.length && others[index][0] < end; index += 1) {
      sum += Math.min(end, others[index][1]) - Math.max(begin, others[index][0]);
    }
  }
  return sum;
}

/** The events of a run, prepared for questions about any moment. */
export class TraceStates {
  #events;
  #steps; // events of computing, by begin
  #numbers;
  #numSlots;
  #uses; // of each streamed group, by begin

  /**
   * @param {object} plan
   * @param {Event[]} events at least one
   */
  constructor(plan, events) {
    this.#events = events;
    this.#numbers = streamedNumbers(plan.groups);
    this.#numSlots = plan.streaming.slots;
    this.#steps = events.filter((event) => event[0] === "compute").sort((a, b) => a[2] - b[2]);
    const byGroup = Map.groupBy(events, (event) => event[1]);
    this.#uses = new Map(this.#numbers.map((number) => [number, usesOf(byGroup.get(number) ?? [])]));
    /** @type {{begin: number, end: number, steps: number, isWhole: boolean}[]} */
    this.passes = passesOf(events);
    this.begin = this.passes[0].begin;
    this.end = this.passes.at(-1).end;
  }

  /**
   * Returns the index of the pass at a time.
   * @param {number} time
   * @returns {number}
   */
  passAt(time) {
    return Math.max(0, this.passes.findLastIndex((pass) => pass.begin <= time));
  }

  /**
   * Returns slots and groups at a time, as /status has them.
   * @param {number} time
   * @returns {{slots: import("./groups.js").SlotState[], computing_group: number | null, reading: number[]}}
   */
  at(time) {
    const found = this.#numbers.map((number) => ({ number, ...stateAt(this.#uses.get(number), time) }));
    const slots = Array.from({ length: this.#numSlots }, (_, slot) => {
      const users = found.filter((one, index) => index % this.#numSlots === slot && one.rank > 0);
      const user = users.reduce((most, one) => (most === null || one.rank > most.rank ? one : most), null);
      return user === null ? { slot, group: null, state: "free" } : { slot, group: user.number, state: user.state };
    });
    const reading = found.filter((one) => one.state === "reading").map((one) => one.number);
    return { slots, computing_group: this.#computingAt(time), reading };
  }

  /**
   * Returns what moved in an interval. An event that is partly inside counts in proportion.
   * @param {number} begin
   * @param {number} end
   * @returns {import("./link.js").Moved}
   */
  moved(begin, end) {
    const inside = this.#events.filter((event) => event[3] > begin && event[2] < end);
    const timesOf = (...lanes) => {
      const found = inside.filter((event) => lanes.includes(event[0]));
      return union(found.map((event) => [Math.max(event[2], begin), Math.min(event[3], end)]));
    };
    const busy = timesOf("copy", "read");
    const waiting = timesOf("stall");
    const copySeconds = lengthOf(busy);
    const bytes = inside.reduce((sum, event) => sum + (event[0] === "copy" ? bytesInside(event, begin, end) : 0), 0);
    return { bytes, copySeconds, hiddenSeconds: copySeconds - overlap(busy, waiting), stallSeconds: lengthOf(waiting) };
  }

  #computingAt(time) {
    const index = lastBefore(this.#steps, time, (step) => step[2]);
    return index >= 0 && this.#steps[index][3] > time ? this.#steps[index][1] : null;
  }
}

/**
 * Returns a group's ways through its slot: read, ready, computed with. The first copy after computing begins a new one.
 * @param {Event[]} events events of one group
 * @returns {Use[]}
 */
function usesOf(events) {
  const uses = [];
  for (const [lane, , begin, end] of [...events].sort((a, b) => a[2] - b[2])) {
    const last = uses.at(-1);
    if (lane === "copy" || lane === "read") {
      if (last === undefined || last.computeEnd !== Infinity) {
        uses.push({ readBegin: begin, readEnd: end, computeBegin: Infinity, computeEnd: Infinity });
      } else last.readEnd = Math.max(last.readEnd, end);
    } else if (lane === "compute" && last === undefined) {
      // its bytes were read before the trace
      uses.push({ readBegin: -Infinity, readEnd: -Infinity, computeBegin: begin, computeEnd: end });
    } else if (lane === "compute") {
      last.computeBegin = Math.min(last.computeBegin, begin);
      last.computeEnd = last.computeEnd === Infinity ? end : Math.max(last.computeEnd, end);
    }
  }
  return uses;
}

/** Returns a group's state at a time; the higher rank has the slot, if two groups of it overlap. */
function stateAt(uses, time) {
  const use = uses[lastBefore(uses, time, (one) => one.readBegin)];
  if (use === undefined || time >= use.computeEnd) return { state: "free", rank: 0 };
  if (time >= use.computeBegin) return { state: "computing", rank: 4 };
  if (time < use.readEnd) return { state: "reading", rank: 2 }; // into a thread's own buffer while the slot is in use
  return { state: "ready", rank: use.computeBegin === Infinity ? 1 : 3 };
}

/** Returns the index of the last item whose key is not above a value; -1 if there is none. */
function lastBefore(items, value, keyOf) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (keyOf(items[middle]) <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function lengthOf(intervals) {
  return intervals.reduce((sum, [begin, end]) => sum + end - begin, 0);
}

function bytesInside([, , from, to, bytes], begin, end) {
  if (to <= from) return from >= begin && from < end ? bytes : 0;
  return (bytes * (Math.min(to, end) - Math.max(from, begin))) / (to - from);
}
