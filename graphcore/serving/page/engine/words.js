// Amounts in words: bytes, rates, times, shares and counts, to three digits.

const BYTE_UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
const TIME_UNITS = [
  [3600, "h", 7200],
  [60, "min", 120],
  [1, "s", 1],
  [1e-3, "ms", 1e-3],
  [1e-6, "µs", 0],
];

/**
 * Returns a number to three digits: "0.0123", "1.5", "118", "12,345".
 * @param {number} value
 * @returns {string}
 */
export function threeDigits(value) {
  return Math.abs(value) < 1000 ? String(Number(value.toPrecision(3))) : Math.round(value).toLocaleString("en");
}

/**
 * Returns a size in binary units, the only ones that the page has: "118 GiB".
 * @param {number} bytes
 * @returns {string}
 */
export function inBytes(bytes) {
  const power = unitOf(Math.abs(bytes));
  return `${threeDigits(bytes / 1024 ** power)} ${BYTE_UNITS[power]}`;
}

/**
 * Returns the largest setting of three digits that is not above a size: "8GiB".
 * @param {number} bytes
 * @returns {string}
 */
export function asSetting(bytes) {
  const power = unitOf(bytes);
  if (power === 0) return String(bytes);
  const value = bytes / 1024 ** power;
  const parts = 10 ** (2 - Math.floor(Math.log10(value))); // of the third digit in one
  return `${Math.floor(value * parts) / parts}${BYTE_UNITS[power]}`;
}

function unitOf(bytes) {
  let power = 0;
  while (power < BYTE_UNITS.length - 1 && Math.round(bytes / 1024 ** power) >= 1024) power += 1;
  return power;
}

/**
 * Returns a rate: "2.1 GiB/s".
 * @param {number} bytesPerSecond
 * @returns {string}
 */
export function inRate(bytesPerSecond) {
  return `${inBytes(bytesPerSecond)}/s`;
}

/**
 * Returns a time in its own unit: "12.3 ms", "20 s", "3 min".
 * @param {number} seconds
 * @returns {string}
 */
export function inTime(seconds) {
  if (seconds <= 0) return "0 s";
  const [unit, name] = TIME_UNITS.find(([, , least]) => seconds >= least);
  return `${threeDigits(seconds / unit)} ${name}`;
}

/**
 * Returns a share as a percentage: "83%". Only a true 0 or 1 is shown as 0% or 100%.
 * @param {number} share
 * @returns {string}
 */
export function inPercent(share) {
  const percent = Math.round(share * 100);
  if (percent === 100 && share < 1) return "over 99%";
  if (percent === 0 && share > 0) return "under 1%";
  return `${percent}%`;
}

/**
 * Returns a count with its noun: "1 layer", "12 layers".
 * @param {number} number
 * @param {string} noun
 * @param {string} [plural]
 * @returns {string}
 */
export function counted(number, noun, plural = `${noun}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}

/**
 * Returns a list as in a sentence: "a, b and c".
 * @param {string[]} parts
 * @returns {string}
 */
export function listed(parts) {
  return parts.length < 2 ? parts.join("") : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`;
}
