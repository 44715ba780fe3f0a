// The groups of a plan: names for people, places, and the colours that tell neighbouring streamed groups apart.

/**
 * @typedef {{name: string, numbers: number[], bytes: number, place: string}} Group
 * @typedef {{slot: number, group: number | null, state: string}} SlotState
 * @typedef {[string, number, number, number, number, number]} Event lane, group, begin, end, bytes, worker
 */

export const NUM_COLOURS = 8;
export const PLACES = {
  resident: "stays in memory",
  streamed: "is read through a slot each time",
  gathered: "only the rows that are needed are fetched",
  cached: "experts are fetched when they are needed",
  mapped: "the GPU reads it in RAM",
};
const LAYERS = /^layers\.(\d+)(?:-(\d+))?$/;
const OTHER_NAMES = { embed_tokens: "embedding", head: "output head", vectors: "norms and biases" };

/**
 * Returns the first and the last layer of a group; null if the group is none of layers.
 * @param {Group} group
 * @returns {[number, number] | null}
 */
export function layersOf(group) {
  const found = LAYERS.exec(group.name);
  return found === null ? null : [Number(found[1]), Number(found[2] ?? found[1])];
}

/**
 * Returns a group's name in words: "layer 3", "layers 4 to 7", "output head".
 * @param {Group} group
 * @returns {string}
 */
export function groupName(group) {
  const layers = layersOf(group);
  if (layers === null) return OTHER_NAMES[group.name] ?? group.name;
  return layers[0] === layers[1] ? `layer ${layers[0]}` : `layers ${layers[0]} to ${layers[1]}`;
}

/**
 * Returns a group's name where there is little room: the numbers of its layers, "3" or "4–7", or its whole name.
 * @param {Group} group
 * @returns {string}
 */
export function groupLabel(group) {
  const layers = layersOf(group);
  if (layers === null) return groupName(group);
  return layers[0] === layers[1] ? String(layers[0]) : `${layers[0]}–${layers[1]}`;
}

/**
 * Returns the name of what has a number in the order of use: a group, or a slice of the head.
 * @param {Group[]} groups
 * @param {number} number
 * @returns {string}
 */
export function numberName(groups, number) {
  const group = groups.find((one) => one.numbers.includes(number));
  if (group === undefined) return `group ${number}`;
  if (group.numbers.length < 2) return groupName(group);
  return `${groupName(group)}, part ${group.numbers.indexOf(number) + 1} of ${group.numbers.length}`;
}

/**
 * Returns the numbers that stream through slots, in the order of use: the one at index i uses slot i % slots.
 * @param {Group[]} groups
 * @returns {number[]}
 */
export function streamedNumbers(groups) {
  return groups.filter((group) => group.place === "streamed").flatMap((group) => group.numbers).sort((a, b) => a - b);
}

/**
 * Returns the index of a colour for each streamed number; neighbours differ.
 * @param {Group[]} groups
 * @returns {Map<number, number>}
 */
export function groupColours(groups) {
  return new Map(streamedNumbers(groups).map((number, index) => [number, index % NUM_COLOURS]));
}

/**
 * Returns the bytes of groups.
 * @param {Group[]} groups
 * @returns {number}
 */
export function sumBytes(groups) {
  return groups.reduce((sum, group) => sum + group.bytes, 0);
}

/**
 * Returns how many layers lie in groups of a place.
 * @param {Group[]} groups
 * @param {string} place
 * @returns {number}
 */
export function numLayersAt(groups, place) {
  const ranges = groups.filter((group) => group.place === place).map(layersOf);
  return ranges.reduce((sum, layers) => sum + (layers === null ? 0 : layers[1] - layers[0] + 1), 0);
}
