// Passes over the weights in a list of events: a decode step, or a chunk of a prompt, is one pass.

const CROWDED = 90; // steps from which on one pass is shown alone, so that its bars have room

/** @typedef {import("./groups.js").Event} Event */

/**
 * Returns the passes in order of time. A pass begins where an earlier group computes than before.
 * @param {Event[]} events
 * @returns {{begin: number, end: number, steps: number, isWhole: boolean}[]} isWhole: true if it reached the last group
 */
export function passesOf(events) {
  if (events.length === 0) return [];
  const steps = events.filter((event) => event[0] === "compute").sort((a, b) => a[2] - b[2]);
  const isOne = new Set(steps.map((step) => step[1])).size === 1; // with one group each step is a pass
  const starts = [0];
  for (let index = 1; index < steps.length; index += 1) {
    if (isOne || steps[index][1] < steps[index - 1][1]) starts.push(index);
  }
  const first = events.reduce((least, event) => Math.min(least, event[2]), Infinity);
  const last = events.reduce((most, event) => Math.max(most, event[3]), -Infinity);
  const highest = steps.reduce((most, step) => Math.max(most, step[1]), -1);
  return starts.map((start, index) => {
    const next = starts[index + 1] ?? steps.length;
    return {
      begin: index === 0 ? first : steps[start][2],
      end: index + 1 < starts.length ? steps[next][2] : last,
      steps: next - start,
      isWhole: steps.slice(start, next).some((step) => step[1] === highest),
    };
  });
}

/**
 * Returns the part of the newest events to draw: the last two whole passes, one if it has many steps, and what follows.
 * @param {Event[]} events
 * @returns {{begin: number, end: number, borders: number[]}} borders: times at which passes begin
 */
export function newestPart(events) {
  const passes = passesOf(events);
  const end = passes.at(-1).end;
  const numOpen = passes.at(-1).isWhole ? 0 : 1;
  const steps = Math.max(...passes.map((pass) => pass.steps));
  const shown = passes.slice(-((2 * steps > CROWDED ? 1 : 2) + numOpen));
  return { begin: shown[0].begin, end, borders: shown.map((pass) => pass.begin) };
}

/**
 * Returns the part to draw around a pass: it and the next, the one before if there is none, or it alone if crowded.
 * @param {{begin: number, end: number, steps: number}[]} passes
 * @param {number} index
 * @returns {{begin: number, end: number, borders: number[]}}
 */
export function partAround(passes, index) {
  const isCrowded = 2 * passes[index].steps > CROWDED;
  const first = isCrowded ? index : Math.max(0, Math.min(index, passes.length - 2));
  const shown = passes.slice(first, isCrowded ? first + 1 : first + 2);
  return { begin: shown[0].begin, end: shown.at(-1).end, borders: shown.map((pass) => pass.begin) };
}
