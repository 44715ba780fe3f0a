// Amounts in words: bytes, rates, times, shares and counts, to three digits.

const BYTE_UNITS = ["bytes", "kB", "MB", "GB", "TB", "PB"];
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
 * Returns a size in decimal units, as budgets are written on the command line: "118 GB".
 * @param {number} bytes
 * @returns {string}
 */
export function inBytes(bytes) {
  let power = 0;
  while (power < BYTE_UNITS.length - 1 && Math.abs(Number((bytes / 1000 ** power).toPrecision(3))) >= 1000) power += 1;
  return `${threeDigits(bytes / 1000 ** power)} ${BYTE_UNITS[power]}`;
}

/**
 * Returns a size as a setting, without a space: "8GB".
 * @param {number} bytes
 * @returns {string}
 */
export function asSetting(bytes) {
  return inBytes(bytes).replace(" bytes", "").replace(" ", "");
}

/**
 * Returns a rate: "2.1 GB/s".
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
