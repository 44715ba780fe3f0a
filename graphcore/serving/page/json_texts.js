/** JSON of a model, indented where that is readable. */

const LARGEST = 2_000_000; // characters that are read
const DEEPEST = 60; // levels that are indented: the indent of deeper ones would be longer than the text

/**
 * Returns whether an answer seems to be JSON as a whole.
 * @param {string} text its beginning at least
 * @returns {boolean}
 */
export function beginsAsJson(text) {
  return /^\s*(?:\{\s*(?:["}]|$)|\[\s*(?:[[{"]|$))/.test(text.slice(0, 200));
}

/**
 * Returns JSON with each part on a line of its own.
 * @param {string} text
 * @returns {string|null} null if it is no JSON object or list
 */
export function indentedJson(text) {
  if (text.length > LARGEST || !/^\s*[[{]/.test(text)) return null;
  try {
    const value = JSON.parse(text);
    return depthOf(text) > DEEPEST ? text : JSON.stringify(value, null, 2);
  } catch {
    return null;
  }
}

function depthOf(text) {
  let [depth, most] = [0, 0];
  for (const [sign] of text.matchAll(/[[\]{}]/g)) {
    depth += sign === "[" || sign === "{" ? 1 : -1;
    most = Math.max(most, depth);
  }
  return most;
}
