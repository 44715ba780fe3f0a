/** JSON of a model, indented where that is readable. */

const LARGEST = 2_000_000; // characters that are read
const DEEPEST = 60; // levels: the indent of deeper ones would be longer than the text

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
 * @returns {string|null} null if it is no JSON object or list, or too long or nested too deeply for an indent
 */
export function indentedJson(text) {
  if (text.length > LARGEST || !/^\s*[[{]/.test(text) || isDeep(text)) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

/** Brackets inside of texts count, too: what has so many of them is shown as it is. */
function isDeep(text) {
  let depth = 0;
  for (const [sign] of text.matchAll(/[[\]{}]/g)) {
    depth += sign === "[" || sign === "{" ? 1 : -1;
    if (depth > DEEPEST) return true;
  }
  return false;
}
