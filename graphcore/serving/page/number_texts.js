/** Numbers as the page writes them. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SIZES = ["bytes", "KiB", "MiB", "GiB"];

/**
 * @param {number} value
 * @returns {string} such as "1,234"
 */
export function whole(value) {
  return WHOLE.format(value);
}

/**
 * @param {number} count
 * @param {string} noun
 * @returns {string} such as "1 token" or "1,234 tokens"
 */
export function counted(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/**
 * @param {number} value
 * @returns {string} with three digits, such as "0.21", "23.4" or "234"
 */
export function short(value) {
  return value >= 100 ? whole(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/**
 * @param {number} bytes
 * @returns {string} such as "12 bytes" or "3.4 MiB"
 */
export function size(bytes) {
  let [value, at] = [bytes, 0];
  while (value >= 1024 && at < SIZES.length - 1) [value, at] = [value / 1024, at + 1];
  return `${at === 0 ? whole(value) : value.toFixed(1)} ${SIZES[at]}`;
}
