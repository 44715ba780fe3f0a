/** Whether the page is being left or loaded again: the browser then ends its requests, which is no fault of the server. */

const LEFT_MILLISECONDS = 5_000; // after which the person has stayed

let leftAt = -Infinity;
for (const type of ["beforeunload", "pagehide"]) window.addEventListener(type, () => (leftAt = performance.now()));

/** @returns {boolean} */
export function isLeaving() {
  return performance.now() - leftAt < LEFT_MILLISECONDS;
}
